"""Named faults of run folders: what a careless copy, a stale cache or a lost write leaves behind. The sweep has the single values."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import numpy as np

from tests.mutations.elements import first_unequal, stored, stored_tensors
from tests.mutations.mutation import folder, named, place, refit, refit_rollout, replace_folder
from tests.mutations.runs import Runs
from tests.mutations.verdicts import Expected
from tests.synthetic_runs import edit_arrays, edit_json


# --- bits that values do not show -------------------------------------------------------------------------------------------------
def other_zero(moment: str) -> Callable[[Runs], Expected]:
    """-0.0 for the first +0.0 of Adam's moments: a token that never came up."""

    def change(runs: Runs) -> Expected:
        for tensor in stored_tensors(folder(runs, f"state/state_v000003/{moment}.safetensors")):
            if (zeros := np.flatnonzero(tensor.patterns() == 0)).size:
                tensor.put(int(zeros[0]), 1 << 31)
                refit(tensor.path)
                return Expected(place(2, moment, tensor=tensor.name, index=tensor.index(int(zeros[0]))))
        raise ValueError(f"{moment}: no +0.0")

    return change


def in_every_run_after_validation(runs: Runs) -> Expected:
    for key in runs.configs:
        stored(runs.paths.run(key) / "i0002/train/logprobs.safetensors", "entropy").one_ulp(1)
    return Expected(reason=f"files of {runs.oracle} changed after its validation")


def fitted(name: str, tensor: str, quantity: str) -> Callable[[Runs], Expected]:
    """One ULP, and the hash beside the file agrees: only another run, or another file of this one, can tell."""

    def change(runs: Runs) -> Expected:
        changed = stored(folder(runs, name), tensor)
        changed.one_ulp(changed.chosen())
        refit(changed.path)
        part = "logprobs" if quantity.endswith("logprob") else tensor
        return Expected(place(1, quantity, tensor=part, index=changed.index(changed.chosen())))

    return change


# --- swaps ------------------------------------------------------------------------------------------------------------------------
def swapped_samples(runs: Runs) -> Expected:
    """Two samples of one prompt change places, with everything that the rollout says of them."""
    path, before = folder(runs, "i0001/rollout/completions.safetensors"), {}

    def change(arrays: dict[str, np.ndarray]) -> None:
        before.update({name: array.copy() for name, array in arrays.items()})
        lengths, responses = arrays["lengths"], arrays["lengths"] - arrays["prompt_lengths"]
        order = swap_of(arrays)
        for name, counts in (("tokens", lengths), ("logprobs", responses)):
            pieces = np.split(arrays[name], np.cumsum(counts)[:-1])
            arrays[name] = np.concatenate([pieces[i] for i in order])
        for name in ("lengths", "rewards", "finish"):
            arrays[name] = arrays[name][order]
        refit_rollout(path, arrays)
        before["at"] = np.flatnonzero(before["tokens"] != arrays["tokens"])[:1]

    edit_arrays(path, change)
    return Expected(place(1, "tokens", tensor="tokens", index=before["at"].tolist()))


def swap_of(arrays: dict[str, np.ndarray]) -> list[int]:
    """An order of the samples that exchanges two of one prompt with different tokens."""
    tokens = np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1])
    prompts, order = arrays["prompt_ids"], list(range(len(tokens)))
    pairs = [(a, b) for b in order for a in order[:b] if prompts[a] == prompts[b] and tokens[a].tolist() != tokens[b].tolist()]
    a, b = pairs[0]
    order[a], order[b] = b, a
    return order


def swapped_rewards(runs: Runs) -> Expected:
    at = []

    def change(arrays: dict[str, np.ndarray]) -> None:
        rewards = arrays["rewards"]
        other = int(np.flatnonzero(rewards != rewards[0])[0])
        rewards[[0, other]] = rewards[[other, 0]]
        at.append(0)

    edit_arrays(folder(runs, "i0002/rollout/completions.safetensors"), change)
    return Expected(place(2, "rewards", tensor="rewards", index=at))


def swapped_arrays(runs: Runs) -> Expected:
    """Two tensors of one shape exchange their names: entropy is the later link of the chain."""
    edit_arrays(folder(runs, "i0002/train/logprobs.safetensors"), lambda a: a.update(entropy=a["advantages"], advantages=a["entropy"]))
    return Expected(place(2, "entropy", tensor="entropy"))


def swapped_moments(runs: Runs) -> Expected:
    state = folder(runs, "state/state_v000002")
    a, b = state / "exp_avg.safetensors", state / "exp_avg_sq.safetensors"
    name, index = first_unequal(a, b)
    for source, target in ((a, state / "x"), (b, a), (state / "x", b)):
        source.rename(target)
    for path in (a, b):
        refit(path)
    return Expected(place(1, "exp_avg", tensor=name, index=index))


def swapped_weights(runs: Runs) -> Expected:
    """Two matrices of one shape exchange their names, and tensors.json agrees."""
    path = folder(runs, "weights/weight_v000002/model.safetensors")
    tensors = stored_tensors(path)
    a, b = next((a, b) for i, a in enumerate(tensors) for b in tensors[i + 1 :] if a.shape == b.shape and len(a.shape) == 2)
    index = a.index(int(np.flatnonzero(a.patterns() != b.patterns())[0]))
    edit_arrays(path, lambda arrays: arrays.update({a.name: arrays[b.name], b.name: arrays[a.name]}))
    refit(path)
    return Expected(place(1, "weights", tensor=a.name, index=index))


# --- stale and missing ------------------------------------------------------------------------------------------------------------
def stale(source: str, target: str, expected: Expected) -> Callable[[Runs], Expected]:
    def change(runs: Runs) -> Expected:
        replace_folder(folder(runs, source), folder(runs, target))
        return expected

    return change


def stale_weights(version: int) -> Callable[[Runs], Expected]:
    """The weights before the step in place of those after it, their hashes with them."""

    def change(runs: Runs) -> Expected:
        files = runs.files(runs.other)
        name, index = first_unequal(files.weights(version) / "model.safetensors", files.weights(version - 1) / "model.safetensors")
        for file in ("model.safetensors", "tensors.json"):
            shutil.copy(files.weights(version - 1) / file, files.weights(version) / file)
        return Expected(place(version - 1, "weights", tensor=name, index=index))

    return change


def stale_state(runs: Runs) -> Expected:
    old, new = (folder(runs, f"state/state_v00000{version}") for version in (2, 3))
    name, index = first_unequal(new / "exp_avg.safetensors", old / "exp_avg.safetensors")
    replace_folder(old, new)
    return Expected(place(2, "exp_avg", tensor=name, index=index), "state/state_v000003/step.json is ")


def missing(name: str, expected: Expected) -> Callable[[Runs], Expected]:
    def change(runs: Runs) -> Expected:
        path = folder(runs, name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return expected

    return change


def missing_step(runs: Runs) -> Expected:
    step = runs.files(runs.other).steps(2)[0]
    edit_json(folder(runs, "i0002/train/metrics.json"), lambda metrics: metrics.pop(str(step)))
    return Expected(place(2, "metrics", step=step), "i0002: optimizer steps in metrics.json is ")


def missing_tensor(runs: Runs) -> Expected:
    path = folder(runs, "weights/weight_v000002/model.safetensors")
    name = stored_tensors(path)[1].name
    edit_arrays(path, lambda arrays: arrays.pop(name))
    return Expected(place(1, "weights", tensor=name, index=None), f"(the first: {name})")


MUTATIONS = [
    named("-0.0 for +0.0 in the first moment, recorded hash fits", other_zero("exp_avg")),
    named("-0.0 for +0.0 in the second moment, recorded hash fits", other_zero("exp_avg_sq")),
    named("one ULP in every run, after validation", in_every_run_after_validation, "none"),
    *(
        named(f"{quantity} changed, recorded hash fits", fitted(name, tensor, quantity))
        for name, tensor, quantity in (
            ("i0001/rollout/completions.safetensors", "tokens", "tokens"),
            ("i0001/rollout/completions.safetensors", "logprobs", "rollout_logprob"),
            ("i0001/rollout/completions.safetensors", "rewards", "rewards"),
            ("i0001/ref_logprob/ref.safetensors", "logprobs", "reference_logprob"),
            ("i0001/train/logprobs.safetensors", "old", "old_logprob"),
            ("i0001/train/logprobs.safetensors", "current", "current_logprob"),
            ("i0001/train/logprobs.safetensors", "entropy", "entropy"),
            ("i0001/train/logprobs.safetensors", "advantages", "advantages"),
            ("weights/weight_v000002/model.safetensors", "model.norm.weight", "weights"),
            ("state/state_v000002/exp_avg.safetensors", "model.embed_tokens.weight", "exp_avg"),
            ("state/state_v000002/exp_avg_sq.safetensors", "model.norm.weight", "exp_avg_sq"),
        )
    ),
    named("two samples swapped", swapped_samples),
    named("two rewards swapped", swapped_rewards),
    named("entropy and advantages swapped", swapped_arrays),
    named("both moments swapped, recorded hash fits", swapped_moments),
    named("two weight matrices swapped, recorded hash fits", swapped_weights),
    named("iteration 1 in place of 2", stale("i0001", "i0002", Expected(place(2, "prompts", tensor="prompt_ids", index=[0])))),
    named(
        "training of iteration 1 in place of 2",
        stale("i0001/train", "i0002/train", Expected(place(2, "old_logprob"), "i0002: optimizer steps in metrics.json is ['0']")),
    ),
    named(
        "reference of iteration 1 in place of 2",
        stale("i0001/ref_logprob", "i0002/ref_logprob", Expected(place(2, "reference_logprob", tensor="logprobs"))),
    ),
    named("weights of version 2 in place of 3", stale_weights(3)),
    named("checkpoint in place of version 2", stale_weights(2)),
    named("state of version 2 in place of 3", stale_state),
    named(
        "missing iteration",
        missing("i0002", Expected(place(2, "prompts", tensor="prompt_ids"), "i0002/rollout/completions.safetensors is missing")),
    ),
    named(
        "missing weights", missing("weights/weight_v000003", Expected(place(2, "weights"), "weight_v000003/model.safetensors is missing"))
    ),
    named("missing step", missing_step),
    named("missing tensor", missing_tensor),
]

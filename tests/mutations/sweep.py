"""Every value that a run has stored, one after the other: tensors by one ULP in one element, JSON values by their last digit."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.digest import canonical_json
from tests.mutations.elements import Stored, new_file, stored_tensors
from tests.mutations.mutation import Mutation
from tests.mutations.runs import Runs
from tests.mutations.verdicts import Expected

ROLLOUT = {
    "prompt_ids": "prompts", "sample_index": "prompts", "prompt_lengths": "prompts", "tokens": "tokens", "lengths": "tokens",
    "finish": "tokens", "logprobs": "rollout_logprob", "rewards": "rewards",
}  # fmt: skip
TRAIN = {"old": "old_logprob", "current": "current_logprob", "entropy": "entropy", "advantages": "advantages"}
SUMMARY = {
    "tokens_sha256": "tokens_sha256 of the rollout's summary", "completions_sha256": "sha256 of completions.jsonl",
    "weight_version": "weight_version of the rollout", "sample_count": "sample_count", "token_count": "token_count",
}  # fmt: skip


def sweep(runs: Runs, of: str = "other", thorough: bool = True) -> Iterator[Mutation]:
    """Mutations of one run (of: "other" or "oracle"), and of the checkpoint. thorough: else readbacks of each stage's last rank only, and
    of the oracle's files only the tensors."""
    key = runs.other if of == "other" else runs.oracle
    mutations = [*tensor_mutations(runs, key)]
    if thorough or of == "other":
        mutations += [*json_mutations(runs, key, thorough), *removals(runs, key, thorough)]
    for mutation in mutations:
        yield replace(mutation, validated="all" if "checkpoint" in mutation.row else of)


# --- tensors ----------------------------------------------------------------------------------------------------------------------
def tensor_mutations(runs: Runs, key: str) -> Iterator[Mutation]:
    for folder in (runs.paths.run(key), runs.paths.checkpoint(runs.checkpoint)):
        for path in sorted(folder.rglob("*.safetensors")):
            place = path.relative_to(folder).as_posix()
            for tensor in (t for t in stored_tensors(path) if t.count):  # a rank without tokens has a sidecar without elements
                flat = tensor.chosen()
                group, expected = of_tensor("checkpoint" if folder != runs.paths.run(key) else place, place, tensor, flat)
                name = f"{place} {tensor.name}{tensor.index(flat)}"
                yield Mutation(name, f"one ULP: {group}", said(expected, tensor.one_ulp, flat), files=(path,))


def of_tensor(where: str, place: str, tensor: Stored, flat: int) -> tuple[str, Expected]:
    """(what it is, what must be said). KeyError or ValueError for a tensor that nobody has thought of: it must not go unchecked."""
    index, name = tensor.index(flat), tensor.name
    iteration = int(place[1:5]) if re.match(r"i\d{4}/", place) else 0

    def part(quantity: str, tensor_name: str) -> Expected:
        return Expected({"iteration": iteration, "quantity": quantity, "tensor": tensor_name, "index": index})

    match where.split("/"):
        case ["checkpoint"]:  # all runs share it; what it should hold stands beside it
            return "checkpoint", Expected(reason=f"sha256 of 1 tensors is not the hash of the stored bytes (the first: {name})")
        case [_, "rollout", "completions.safetensors"]:
            return f"rollout {name}", part(ROLLOUT[name], name)
        case [_, "ref_logprob", "ref.safetensors"]:
            return f"reference {name}", part("reference_logprob", name)
        case [_, "train", "logprobs.safetensors"]:
            return f"training {name}", part(TRAIN[name], "logprobs" if name in ("old", "current") else name)
        case [_, "sidecars", _] if name == "slots":
            return "sidecar slots", Expected(reason=f"{place.rpartition('/')[0]}: ")
        case [_, "sidecars", _]:
            return f"sidecar {name}", Expected(reason=f"{place}: 1 {name} logprobs differ from the iteration's (slot ")
        case ["weights", version, "model.safetensors"]:
            iteration = int(version.removeprefix("weight_v")) - 1
            return "weights", part("weights", name)
        case ["state", version, file]:
            iteration = int(version.removeprefix("state_v")) - 1
            return file.removesuffix(".safetensors"), part(file.removesuffix(".safetensors"), name)
        case _:
            raise ValueError(f"{place}: a file of tensors that no mutation covers")


# --- JSON -------------------------------------------------------------------------------------------------------------------------
def json_mutations(runs: Runs, key: str, every_rank: bool) -> Iterator[Mutation]:
    folder = runs.paths.run(key)
    for path in sorted(folder.rglob("*.json")):
        place = path.relative_to(folder).as_posix()
        last = sorted(path.parent.glob("*.json"))[-1]
        if "/readbacks/" in place and not every_rank and path != last:
            continue
        content = json.loads(path.read_text())
        for keys, value in leaves(content):
            group, expected = of_value(runs, place, keys, content)
            change = said(expected, put_value, path, keys, last_digit(value))
            yield Mutation(f"{place} {'.'.join(map(str, keys))}", f"last digit: {group}", change, files=(path,))


def said(expected: Expected, change: Callable[..., None], *args: Any) -> Callable[[Runs], Expected]:
    def apply(_: Runs) -> Expected:
        change(*args)
        return expected

    return apply


def put_value(path: Path, keys: tuple, value: Any) -> None:
    new_file(path, f"{canonical_json(replaced(json.loads(path.read_text()), keys, value))}\n".encode())


def leaves(content: Any, keys: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """(keys, value) of everything that is no object and no list."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    if not isinstance(content, dict | list):
        yield keys, content
    for key, value in items:
        yield from leaves(value, (*keys, key))


def replaced(content: Any, keys: tuple, value: Any) -> Any:
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return content


def last_digit(value: Any) -> Any:
    """The next double, integer, or string with another last character."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return math.nextafter(value, math.inf)
    if isinstance(value, int):
        return value + 1
    return f"{value[:-1]}{'0' if value[-1] != '0' else '1'}" if value else "0"


def of_value(runs: Runs, place: str, keys: tuple, content: Any) -> tuple[str, Expected]:
    """(what it is, what must be said). ValueError for a file that nobody has thought of."""
    iteration = int(place[1:5]) if re.match(r"i\d{4}/", place) else 0
    match place.split("/"), keys:
        case [[_, "train", "metrics.json"], [step, metric]]:
            quantity = "gradient_norm" if metric == "train/grad_norm" else "metrics"
            place_of = {"iteration": iteration, "step": int(step), "quantity": quantity, "tensor": metric, "index": None}
            return "metric", Expected(place_of)
        case [[_, "rollout", "summary.json"], ["metrics", metric]]:
            return "rollout metric", Expected({"iteration": iteration, "quantity": "rollout_metrics", "tensor": metric})
        case [[_, "train", "hashes.json"], ["updates", update, "gradients", name]]:
            step = runs.files(runs.other).steps(iteration)[update]
            return "gradient hash", Expected({"iteration": iteration, "step": step, "quantity": "gradients", "tensor": name})
        case [[_, "train", "hashes.json"], ["updates", _, "grad_norm_hex"]]:
            return "recorded hash", Expected(reason=f"i{iteration:04d}: grad_norm_hex of step ")
        case [[_, "train", "hashes.json"], ["metrics"]]:
            return "recorded hash", Expected(reason=f"{place}: metrics is not the sha256 of metrics.json")
        case [[_, "train", "hashes.json"] | [_, "rollout", "summary.json"], ["sha256", _] | ["digest"]]:
            return "recorded hash", Expected(reason=f"{place}: digest is not that of its content")
        case [["weights" | "state", _, "tensors.json"] | [_, "ref_logprob", "tensors.json"], ["sha256", _] | ["digest"]]:
            return "recorded hash", Expected(reason=f"{place}: digest is not that of its sha256")
        case [[_, "rollout", "summary.json"], [name]]:
            return "rollout summary", Expected(reason=f"i{iteration:04d}: {SUMMARY[name]} ")
        case [["weights", _, "config.json" | "generation_config.json" as file], _]:
            return "model file", Expected(reason=f"{place}: is not the checkpoint's {file}")
        case [["state", _, "step.json"], ["step"]]:
            return "step.json", Expected(reason=f"{place} is {content['step'] + 1}, expected {content['step']}")
        case [[_, "readbacks", _, _], ["versions", package]]:
            return "readback", Expected(reason=f"ranks ran several versions of {package}: ")
        case [[_, "readbacks", _, _], _]:
            return "readback", Expected(reason=f"{place}: ")
        case _:
            raise ValueError(f"{place} {keys}: a value that no mutation covers")


# --- files ------------------------------------------------------------------------------------------------------------------------
def removals(runs: Runs, key: str, every_rank: bool) -> Iterator[Mutation]:
    """Each file of the run, taken away."""
    folder = runs.paths.run(key)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        place = path.relative_to(folder).as_posix()
        if "/readbacks/" in place and not every_rank and path != sorted(path.parent.glob("*.json"))[-1]:
            continue
        yield Mutation(f"{place} removed", "file removed", said(Expected(**of_file(place)), path.unlink), files=(path,))


FIRST_MISSED = {  # the causally first quantity of an iteration's file
    "completions.safetensors": "prompts",
    "summary.json": "rollout_metrics",
    "ref.safetensors": "reference_logprob",
    "logprobs.safetensors": "old_logprob",
    "metrics.json": "metrics",
    "hashes.json": "gradients",
}


def of_file(place: str) -> dict[str, Any]:
    """What must be said when it is missing; results that lay in it are a difference besides."""
    name = place.rpartition("/")[2]
    match place.split("/"):
        case [iteration, "rollout", "completions.jsonl"]:
            return {"reason": f"{iteration}: sha256 of completions.jsonl is None"}
        case [_, "sidecars" | "readbacks", *_]:
            return {"reason": f"{place}: {'sidecar' if '/sidecars/' in place else 'readback'} is missing"}
        case ["weights" | "state", _, "tensors.json"] | [_, "ref_logprob", "tensors.json"]:
            return {"reason": f"{place}: no sha256 to hold the stored bytes against"}
        case ["weights", _, "config.json" | "generation_config.json"]:
            return {"reason": f"{place}: is not the checkpoint's {name}"}
        case ["state", _, "step.json"]:
            return {"reason": f"{place} is None, expected "}
        case [iteration, _, _] if name in FIRST_MISSED:
            quantity = FIRST_MISSED[name]
        case ["weights" | "state", version, _]:
            iteration = f"i{int(version.partition('_v')[2]) - 1:04d}"
            quantity = "weights" if name == "model.safetensors" else name.removesuffix(".safetensors")
        case _:
            raise ValueError(f"{place}: a file that no mutation covers")
    return {"place": {"iteration": int(iteration[1:]), "quantity": quantity}, "reason": f"{place} is missing"}

"""The metrics of a run's steps, computed again from the arrays in its folder."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import Any

from . import objectives
from .checks import Checks
from .metrics import iterations
from .objectives import Tokens
from .run_files import RunFiles

INTS = ("lengths", "prompt_lengths", "finish", "sample_index")
NOT_RECOMPUTED = "train/grad_norm, gradients, moments and weights as results of training: gradients are stored as hashes only"


def check_metrics(own: RunFiles, settings: dict[str, Any] | None, checks: Checks) -> None:
    """settings: the run's configuration, where it is known."""
    checks.note(NOT_RECOMPUTED)
    if settings is None:
        checks.note(f"{own.key}: metrics that depend on the objective's settings, which are in params.yaml (give --root)")
    for number, steps in enumerate(iterations(own.run), 1):
        arrays = own.attempt(lambda number=number: _arrays(own, number))
        if arrays is not None:
            own.attempt(lambda arrays=arrays, number=number, steps=steps: _check_iteration(own, number, steps, arrays, settings, checks))


def _arrays(own: RunFiles, number: int) -> dict[str, array]:
    sources = own.arrays(number)
    rollout, reference, train = (sources[name] for name in ("rollout", "ref_logprob", "train"))
    if rollout is None or reference is None or train is None:
        raise ValueError(f"i{number:04d}: a file is missing, so that no metric can be computed again")
    arrays = {name: rollout.numbers(name, "int32") for name in INTS}
    arrays |= {"rewards": rollout.numbers("rewards", "float32"), "rollout": rollout.numbers("logprobs", "float32")}
    arrays["reference"] = reference.numbers("logprobs", "float32")
    arrays |= {name: train.numbers(name, "float32") for name in ("old", "current", "entropy", "advantages")}
    samples, tokens = len(arrays["lengths"]), sum(arrays["lengths"]) - sum(arrays["prompt_lengths"])
    for name, values in arrays.items():
        if len(values) != (samples if name in (*INTS, "rewards") else tokens):
            raise ValueError(f"i{number:04d}: {name} has {len(values)} values for {samples} samples of {tokens} response tokens")
    if not samples or any(length <= prompt for length, prompt in zip(arrays["lengths"], arrays["prompt_lengths"])):
        raise ValueError(f"i{number:04d}: a sample has no response token")
    return arrays


def _check_iteration(
    own: RunFiles, number: int, steps: list[str], arrays: dict[str, array], settings: dict[str, Any] | None, checks: Checks
) -> None:
    responses = [length - prompt for length, prompt in zip(arrays["lengths"], arrays["prompt_lengths"])]
    group = settings["sampling"]["samples_per_prompt"] if settings else max(arrays["sample_index"]) + 1
    if len(responses) % group or len(responses) % len(steps):
        raise ValueError(f"i{number:04d}: {len(responses)} samples fill no groups of {group}, or no {len(steps)} steps")
    rewards, reported = arrays["rewards"].tolist(), own.run["steps"][steps[0]]
    for name, value in objectives.rollout_metrics(rewards, responses, arrays["finish"].tolist(), group).items():
        if name in reported or settings:
            checks.equal(f"{own.key}: {name} of iteration {number}", reported.get(name), value)
    _check_advantages(own, number, rewards, responses, arrays["advantages"].tolist(), group, settings, checks)
    offsets, count = [0, *accumulate(responses)], len(responses) // len(steps)
    for i, step in enumerate(steps):
        first, stop = i * count, (i + 1) * count
        part = slice(offsets[first], offsets[stop])
        columns = {name: arrays[name][part].tolist() for name in ("current", "old", "rollout", "reference", "advantages", "entropy")}
        tokens = Tokens(**columns, lengths=responses[first:stop])
        found = objectives.counted(tokens) | (objectives.metrics(tokens, settings["objective"]) if settings else {})
        if settings:
            total = settings["iterations"] * settings["objective"]["num_updates"]
            rate = objectives.learning_rate(settings["optimizer"], int(step), total)
            found |= {name: rate for name in own.run["steps"][step] if name.startswith("train/lr-")}
        for name, value in found.items():
            reported_value = own.run["steps"][step].get(name)
            checks.that(reported_value == value, f"{own.key}: {name} of step {step}", f"is {reported_value}, the arrays give {value}")


def _check_advantages(
    own: RunFiles,
    number: int,
    rewards: list[float],
    responses: list[int],
    stored: list[float],
    group: int,
    settings: dict[str, Any] | None,
    checks: Checks,
) -> None:
    kinds = [settings["objective"]["normalize_std"]] if settings else [True, False]
    possible = []
    for normalize_std in kinds:
        by_sample = objectives.advantages(rewards, group, normalize_std)
        possible.append([value for value, length in zip(by_sample, responses) for _ in range(length)])
    wrong = min(([i for i, pair in enumerate(zip(stored, values)) if pair[0] != pair[1]] for values in possible), key=len)
    checks.that(
        not wrong, f"{own.key}: advantages of iteration {number}", f"{len(wrong)} do not follow from the rewards (the first: {wrong[:1]})"
    )

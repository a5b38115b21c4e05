"""The logprobs that every rank dumped at every call, byte by byte against the iteration's arrays, and the counts made of them."""

from __future__ import annotations

import array
import math
from dataclasses import dataclass

from .checks import Checks
from .layouts import degrees
from .metrics import iterations
from .run_files import RunFiles
from .tensor_files import TensorFile

SIDES = ("rollout", "old", "current")


@dataclass
class Totals:
    """Over all tokens of the run, by bit patterns."""

    elements: int = 0
    samples: int = 0
    old_rollout: int = 0
    current_old: int = 0
    current_rollout: int = 0
    largest: float = 0.0


def check_sidecars(own: RunFiles, checks: Checks) -> None:
    claimed = own.run["validation"]["train_rollout_logprob"]
    totals, artifacts = Totals(), []
    for number in range(1, len(iterations(own.run)) + 1):
        arrays = own.attempt(lambda number=number: _arrays(own, number))
        if arrays is not None:
            _count(arrays, totals)
            artifacts += _check_iteration(own, number, arrays, checks)
    place = f"{own.key}: train_rollout_logprob"
    checks.equal(f"{place}: artifacts", claimed["artifacts"], artifacts)
    for name, value in {
        "element_count": totals.elements,
        "sample_count": totals.samples,
        "bitwise_mismatch_count": totals.old_rollout,
        "current_old_mismatch_count": totals.current_old,
        "current_rollout_mismatch_count": totals.current_rollout,
        "max_abs_diff": totals.largest,
    }.items():
        checks.equal(f"{place}: {name}", claimed[name], value)


def _arrays(own: RunFiles, number: int) -> dict[str, array.array]:
    rollout, train = own.arrays(number)["rollout"], own.arrays(number)["train"]
    if rollout is None or train is None:
        raise ValueError(f"i{number:04d}: sidecars have no arrays to be held against")
    arrays = {"rollout": rollout.numbers("logprobs", "float32"), "lengths": rollout.numbers("lengths", "int32")}
    arrays |= {name: train.numbers(name, "float32") for name in ("old", "current")}
    if len({len(arrays[side]) for side in SIDES}) != 1:
        raise ValueError(f"i{number:04d}: rollout, old and current logprobs are not of the same tokens")
    return arrays


def _count(arrays: dict[str, array.array], totals: Totals) -> None:
    rollout, old, current = (_bits(arrays[side]) for side in SIDES)
    totals.elements += len(old)
    totals.samples += len(arrays["lengths"])
    totals.old_rollout += sum(a != b for a, b in zip(old, rollout))
    totals.current_old += sum(a != b for a, b in zip(current, old))
    totals.current_rollout += sum(a != b for a, b in zip(current, rollout))
    differences = (abs(a - b) for a, b in zip(arrays["old"], arrays["rollout"]))
    totals.largest = max(totals.largest, max(differences, default=0.0), key=lambda x: math.inf if math.isnan(x) else x)


def _bits(values: array.array) -> array.array:
    return array.array("I", values.tobytes())


def _check_iteration(own: RunFiles, number: int, arrays: dict[str, array.array], checks: Checks) -> list[str]:
    """Every token is in as many files as there are tensor-parallel ranks, with the iteration's own bits. Returns the files' names."""
    name = f"i{number:04d}"
    folder = own.attempt(lambda: own.folder.below(name, "sidecars"))
    names = [] if folder is None else [file for file in folder.names() if file.endswith(".safetensors")]
    whole = {side: _bits(arrays[side]) for side in SIDES}
    seen = [0] * len(arrays["old"])
    for file in names:
        source = own.tensors(name, "sidecars", file)
        if source is not None:
            own.attempt(lambda source=source: _compare(own, source, whole, seen, checks))
    tp = (degrees(own.run["layout"]) or (1,))[0]
    wrong = [slot for slot, count in enumerate(seen) if count != tp]
    checks.that(not wrong, own.key, f"{name}/sidecars: {len(wrong)} tokens are not in exactly {tp} files (the first: slot {wrong[:1]})")
    return [f"{name}/sidecars/{file}" for file in names]


def _compare(own: RunFiles, source: TensorFile, whole: dict[str, array.array], seen: list[int], checks: Checks) -> None:
    slots = source.numbers("slots", "int32")
    dumped = {side: _bits(source.numbers(side, "float32")) for side in SIDES}
    if any(len(values) != len(slots) for values in dumped.values()) or not all(0 <= slot < len(seen) for slot in slots):
        raise ValueError(f"{source.shown}: slots and logprobs do not fit together")
    for slot in slots:
        seen[slot] += 1
    for side, values in dumped.items():
        wrong = [slot for slot, bits in zip(slots, values) if bits != whole[side][slot]]
        checks.that(
            not wrong, own.key, f"{source.shown}: {len(wrong)} {side} logprobs are not the iteration's (the first: slot {wrong[:1]})"
        )

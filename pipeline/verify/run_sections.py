"""The sections that hold the runs side by side, by the hash of every tensor of every run: which differ, and how many there are."""

from __future__ import annotations

from typing import Any

from .checks import Checks, alike
from .run_files import RunFiles

MOMENTS = ("exp_avg", "exp_avg_sq")


def check_sections(report: dict[str, Any], owns: list[RunFiles], checks: Checks) -> None:
    """owns: all runs of the report, in its order."""
    for number, row in enumerate(report["all_parameter_hash_comparisons"]):
        _check_row(row, "unequal_parameter_tensors", owns, (number, None, "weights"), checks)
    for row in report["gradient_hash_comparisons"]:
        _check_row(row, "unequal_gradient_tensors", owns, (row["iteration"], str(row["step"]), "gradients"), checks)
    for number, row in enumerate(report["adam_state_comparisons"], 1):
        for name in MOMENTS:
            _check_row(row[name], "unequal_tensors", owns, (number, None, name), checks)
    stored = {own.key: sum(len(parts) for place, parts in own.parts.items() if place in own.sources) for own in owns}
    gradients = sum(len(parts) for own in owns for place, parts in own.parts.items() if place[2] == "gradients")
    checks.equal("totals.tensors, by the files", report["totals"]["tensors"], sum(stored.values()) + gradients)
    logprobs = sum(4 * _responses(own) for own in owns)
    checks.equal("totals.logprobs, by the files", report["totals"]["logprobs"], logprobs)
    for own in owns:
        seen = own.run["validation"]["file_hashes"]
        if seen["result_digest"] == own.run["result_digest"]:
            checks.equal(f"{own.key}: validation.file_hashes.tensors_read, by the files", seen["tensors_read"], stored[own.key])


def _check_row(row: dict[str, Any], unequal: str, owns: list[RunFiles], place: tuple[int, str | None, str], checks: Checks) -> None:
    parts = [own.parts.get(place, {}) for own in owns]
    names = sorted({name for own in parts for name in own})
    differ = [name for name in names if not alike([own.get(name) for own in parts])]
    where = f"{place[2]} of iteration {place[0]}" + (f", step {place[1]}" if place[1] else "")
    checks.equal(f"{where}: tensor_count, by the files", row["tensor_count"], len(names))
    checks.equal(f"{where}: {unequal}, by the files", row[unequal], differ)


def _responses(own: RunFiles) -> int:
    """Response tokens of all iterations."""
    total = 0
    for (_, _, quantity), source in own.sources.items():
        if quantity == "tokens":
            lengths = own.attempt(lambda source=source: source.numbers("lengths", "int32")) or []
            prompts = own.attempt(lambda source=source: source.numbers("prompt_lengths", "int32")) or []
            total += sum(lengths) - sum(prompts)
    return total

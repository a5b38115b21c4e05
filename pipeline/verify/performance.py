"""Times: the sums, ratios and rates between them, to the last bit. No check can tell whether a time was measured."""

from __future__ import annotations

import math
from typing import Any

from .checks import Checks
from .form import is_ours
from .layouts import world_size

ROLLOUT, REFERENCE, TRAIN = (
    ("update_weights_time", "rollout_time"),
    ("ref_log_probs_time",),
    ("data_preprocess_time", "log_probs_time", "actor_train_time"),
)
STAGES = {"rollout": ROLLOUT, "ref_logprob": REFERENCE, "train": TRAIN}
PARTS = ("data_preprocess_time", "ref_log_probs_time", "log_probs_time", "actor_train_time")  # of train_time, in the order of the sum
RATES = {"log_probs": 1, "ref_log_probs": 1, "actor_train": 3}  # a training pass counts three forwards
SUMS = {  # what is computed: from what
    "train_wait_time": ROLLOUT,
    "train_time": PARTS,
    "step_time": ("train_wait_time", "train_time"),
    "wait_time_ratio": ("train_wait_time", "step_time"),
    "actor_train_tok_per_s": ("actor_train_time",),
    **{f"{name}_tflops": (f"{name}_time",) for name in RATES},
}


def check_performance(report: dict[str, Any], checks: Checks) -> None:
    ours = is_ours(report)
    work: dict[str, set[int]] = {}  # of an iteration, over all runs: floating point operations
    for run in report["runs"]:
        for step, row in run["performance"].items():
            place = f"{run['run_id']}: performance of step {step}"
            times = {name.removeprefix("perf/"): value for name, value in row.items() if name.startswith("perf/")}
            if ours:
                _check_fields(row, times, place, checks)
            _check_sums(times, place, ours, checks)
            _check_rates(times, run["tokens"][step]["token_count"], place, checks)
            if all(times[f"{name}_tflops"] is not None for name in RATES):
                total = operations(times, world_size(run) if ours else 1)
                checks.that(total, f"{place}: *_tflops", "are not one number of operations over the three times")
                work.setdefault(step, set()).add(total or 0)
        if ours:
            _check_executed(run, checks)
    for step, found in work.items():
        if not ours or report["verdict"] == "identical":
            checks.that(len(found) == 1, f"performance of step {step}: *_tflops", f"runs did different work: {sorted(found)}")
    if ours:
        fresh = all(run["executed_or_cached"] and set(run["executed_or_cached"].values()) == {"executed"} for run in report["runs"])
        checks.that(report["verification"] == "cached" or fresh, "verification", "is fresh, but not every stage was executed")


def _check_fields(row: dict[str, Any], times: dict[str, Any], place: str, checks: Checks) -> None:
    """All measured, or a reason that names the stages which weren't; and nothing is computed from what is missing."""
    checks.equal(f"{place}: fields", sorted(times), sorted({*SUMS, *ROLLOUT, *REFERENCE, *TRAIN}))
    kinds = all(value is None or isinstance(value, float) for value in times.values())
    checks.that(kinds, place, "holds something else than seconds and rates")
    absent = sorted(stage for stage, names in STAGES.items() if any(times[name] is None for name in names))
    text = f"no timing of {', '.join(absent)}: not run here (cached), or its log is gone"
    checks.equal(f"{place}: reason", row["reason"], text if absent else None)
    for name, parts in SUMS.items():
        known = all(times[part] is not None for part in parts)
        fits = (times[name] is not None) == known or (known and name.endswith("_tflops"))  # a rate takes the model's shape as well
        checks.that(fits, f"{place}: {name}", f"does not go with {', '.join(parts)}")
    shapes = {times[f"{name}_tflops"] is None for name in RATES if times[f"{name}_time"] is not None}
    checks.that(len(shapes) < 2, f"{place}: *_tflops", "are there for some of the times only")


def _added(values: list[float]) -> set[float]:
    """Added from the left, or exactly and rounded once: Python's own sum() does the one up to 3.11 and the other from 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return {total, math.fsum(values)}


def _check_sums(times: dict[str, Any], place: str, ours: bool, checks: Checks) -> None:
    for name, value in times.items():
        checks.that(value is None or value > 0 or (name == "data_preprocess_time" and value == 0), f"{place}: {name}", "is not positive")
    whole, wait, step = (times[name] for name in ("train_time", "train_wait_time", "step_time"))
    if whole is not None:
        sums = _added([times[name] for name in PARTS])
        # the published training block holds more than its four parts
        checks.that(whole in sums if ours else whole >= max(sums), f"{place}: train_time", f"is {whole}, its parts give {max(sums)}")
    if wait is not None:
        waited = [times[name] for name in ROLLOUT if name in times]
        checks.that(wait >= max(_added(waited)), f"{place}: train_wait_time", f"is shorter than its parts, {waited}")
    if step is not None and wait is not None and whole is not None:
        sums = _added([wait, whole])
        checks.that(step in sums, f"{place}: step_time", f"is {step}, its parts give {max(sums)}")


def _check_rates(times: dict[str, Any], tokens: int, place: str, checks: Checks) -> None:
    if times["step_time"] is not None:
        checks.equal(f"{place}: wait_time_ratio", times["wait_time_ratio"], times["train_wait_time"] / times["step_time"])
    if times["actor_train_time"] is not None:
        checks.equal(f"{place}: actor_train_tok_per_s", times["actor_train_tok_per_s"], tokens / times["actor_train_time"])


def operations(times: dict[str, Any], ranks: int) -> int | None:
    """The whole number of operations of a forward pass that gives all three rates, or None."""
    near = round(times["log_probs_tflops"] * times["log_probs_time"] * 1e12 * ranks)
    for total in range(near - 4, near + 5):
        if all(times[f"{name}_tflops"] in _rates(total, factor, ranks, times[f"{name}_time"]) for name, factor in RATES.items()):
            return total
    return None


def _rates(total: int, factor: int, ranks: int, seconds: float) -> tuple[float, float]:
    """TFLOP/s of a rank: as ours are computed, and as the published ones are."""
    return factor * float(total) / ranks / 1e12 / seconds, factor * (total / ranks / 1e12) / seconds


def _check_executed(run: dict[str, Any], checks: Checks) -> None:
    """A stage was executed here when each of its iterations has times."""
    executed, rows = run["executed_or_cached"], run["performance"].values()
    for stage, names in STAGES.items() if executed else ():
        timed = all(row[f"perf/{name}"] is not None for row in rows for name in names)
        checks.equal(f"{run['run_id']}: executed_or_cached.{stage}", executed[stage], "executed" if timed else "cached")

"""The sections that hold the runs side by side: equal or not is what the values beside the claim say."""

from __future__ import annotations

import re
from typing import Any

from .chains import GRADIENT_NORM, digest_at
from .checks import Checks, alike
from .form import is_ours
from .metrics import iterations

SHA256 = re.compile(r"[0-9a-f]{64}")


def check_tokens(report: dict[str, Any], checks: Checks) -> None:
    runs = report["runs"]
    if is_ours(report):  # the chain's tokens are token ids, lengths and how samples ended
        equal = all(alike([digest_at(run, i, None, "tokens") for run in runs]) for i in range(1, len(runs[0]["chain"])))
    else:
        equal = alike([{step: row["sha256"] for step, row in run["tokens"].items()} for run in runs])
    checks.equal("tokens_equal", report["tokens_equal"], equal)
    if equal:
        for run in runs[1:]:
            checks.equal(f"{run['run_id']}: tokens, as of {runs[0]['run_id']}", run["tokens"], runs[0]["tokens"])
    for run in runs:
        for step, row in run["tokens"].items():
            checks.that(0 < row["sample_count"] <= row["token_count"], f"{run['run_id']}: tokens of step {step}", "counts are impossible")


def check_hashes(report: dict[str, Any], checks: Checks) -> None:
    runs, ours = report["runs"], is_ours(report)
    steps = [(number, int(step)) for number, own in enumerate(iterations(runs[0]), 1) for step in own]
    iteration_numbers = range(1, len(iterations(runs[0])) + 1)
    rows = report["all_parameter_hash_comparisons"]
    versions = [f"weight_v{number:06d}" for number in (1, *(number + 1 for number in iteration_numbers))]
    checks.equal("all_parameter_hash_comparisons", [row["version"] for row in rows], versions)
    counts = {row["tensor_count"] for row in rows[1:] or rows}  # a checkpoint may hold a tied head twice
    for row in rows:
        _check_hashes(row, "unequal_parameter_tensors", f"all_parameter_hash_comparisons {row['version']}", len(runs), checks)
    if ours:
        places = [(row["iteration"], row["step"]) for row in report["gradient_hash_comparisons"]]
        checks.equal("gradient_hash_comparisons", [list(place) for place in places], [list(place) for place in steps])
        for row in report["gradient_hash_comparisons"]:
            _check_hashes(row, "unequal_gradient_tensors", f"gradient_hash_comparisons of step {row['step']}", len(runs), checks)
            counts.add(row["tensor_count"])
        _check_adam(report, [f"state_v{number + 1:06d}" for number in iteration_numbers], checks, counts)
        _check_logprobs(report, list(iteration_numbers), checks)
    if not ours or all(run["validation"]["passed"] for run in runs):
        checks.that(
            len(counts) == 1 and min(counts) > 0, "tensor_count", f"differs between weights, gradients and moments: {sorted(counts)}"
        )
        checks.that(rows[0]["tensor_count"] - min(counts) in (0, 1), "tensor_count", f"of the checkpoint is {rows[0]['tensor_count']}")
        if not ours:
            checks.equal("tensor_count of the checkpoint", rows[0]["tensor_count"], min(counts))


def _check_adam(report: dict[str, Any], versions: list[str], checks: Checks, counts: set[int]) -> None:
    rows = report["adam_state_comparisons"]
    checks.equal("adam_state_comparisons", [row["version"] for row in rows], versions)
    for row in rows:
        moments = {name: row[name] for name in ("exp_avg", "exp_avg_sq")}
        for name, moment in moments.items():
            _check_hashes(moment, "unequal_tensors", f"adam_state_comparisons {row['version']}: {name}", len(report["runs"]), checks)
            counts.add(moment["tensor_count"])
        equal = all(moment["bitwise_equal"] for moment in moments.values())
        checks.equal(f"adam_state_comparisons {row['version']}: bitwise_equal", row["bitwise_equal"], equal)


def _check_logprobs(report: dict[str, Any], numbers: list[int], checks: Checks) -> None:
    rows = report["logprob_comparisons"]
    checks.equal("logprob_comparisons", [row["iteration"] for row in rows], numbers)
    for row in rows:
        place = f"logprob_comparisons of iteration {row['iteration']}"
        for name, quantity in row["quantities"].items():
            checks.equal(f"{place}: {name}", quantity["bitwise_equal"], alike(quantity["sha256"]))
        checks.equal(f"{place}: bitwise_equal", row["bitwise_equal"], all(own["bitwise_equal"] for own in row["quantities"].values()))


def _check_hashes(row: dict[str, Any], unequal: str, place: str, num_runs: int, checks: Checks) -> None:
    hashes, names = row["sha256"], row[unequal]
    checks.equal(f"{place}: number of hashes", len(hashes), num_runs)
    checks.that(all(own is None or SHA256.fullmatch(own) for own in hashes), f"{place}: sha256", "holds what is no sha256")
    checks.equal(f"{place}: bitwise_equal", row["bitwise_equal"], alike(hashes))
    checks.that(
        (not names) == alike(hashes) or not any(hashes), f"{place}: {unequal}", f"names {len(names)} tensors, which contradicts the hashes"
    )
    checks.that(names == sorted(set(names)) and len(names) <= row["tensor_count"], f"{place}: {unequal}", "are not names of its tensors")


def check_norms(report: dict[str, Any], checks: Checks) -> None:
    runs = report["runs"]
    rows = report["gradient_norm_comparisons"]
    steps = [(number, int(step)) for number, own in enumerate(iterations(runs[0]), 1) for step in own]
    checks.equal("gradient_norm_comparisons", [row["step"] for row in rows], [step for _, step in steps])
    for row, (number, step) in zip(rows, steps):
        place = f"gradient_norm_comparisons of step {step}"
        norms = [run["steps"][str(step)].get(GRADIENT_NORM) for run in runs]
        checks.equal(f"{place}: norms", row["norms"], norms)
        checks.equal(f"{place}: exactly_equal", row["exactly_equal"], alike(norms))
        known = [norm for norm in norms if norm is not None]
        spread = (max(known) - min(known)) / max(known) * 100 if known and max(known) else 0.0
        checks.equal(f"{place}: relative_difference_percent", row["relative_difference_percent"], spread)
        if is_ours(report):
            checks.equal(f"{place}: hex", row["hex"], [None if norm is None else norm.hex() for norm in norms])
            checks.equal(f"{place}: iteration", row["iteration"], number)


def check_metric_rows(report: dict[str, Any], checks: Checks) -> None:
    """Every metric by its exact value: the rollout's by iteration, the training's by optimizer step."""
    runs, expected = report["runs"], []
    for number, steps in enumerate(iterations(runs[0]), 1):
        expected.append(_metric_row(runs, number, None, steps[0], "rollout/"))
        expected += [_metric_row(runs, number, int(step), step, "train/") for step in steps]
    rows = report["metric_comparisons"]
    places = [[row["iteration"], row["step"]] for row in rows]
    checks.equal("metric_comparisons", places, [[row["iteration"], row["step"]] for row in expected])
    for row, wanted in zip(rows, expected):
        checks.equal(f"metric_comparisons of iteration {wanted['iteration']}, step {wanted['step']}", row, wanted)


def _metric_row(runs: list[dict[str, Any]], number: int, step: int | None, key: str, side: str) -> dict[str, Any]:
    own = [{name: float(value).hex() for name, value in run["steps"].get(key, {}).items() if name.startswith(side)} for run in runs]
    names = sorted({name for values in own for name in values})
    unequal = {name: [values.get(name) for values in own] for name in names if not alike([values.get(name) for values in own])}
    equal = bool(names) and not unequal
    return {"bitwise_equal": equal, "iteration": number, "metric_count": len(names), "step": step, "unequal_metrics": unequal}

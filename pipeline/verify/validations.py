"""The validation of each run: verdicts from the errors beside them, counts from the metrics of the steps."""

from __future__ import annotations

from typing import Any

from .checks import Checks
from .form import is_ours
from .layouts import micro_batches, world_size
from .metrics import ABS_DIFF, BATCH, MAX_ABS_DIFF, MISMATCH, NUMEL, iterations

PARTS = ("runtime_readbacks", "runtime_scalar_logprob", "train_rollout_logprob")
DISTANCES = ("max_abs_diff", "mismatch_kl", "mismatch_k3_kl", "train_rollout_logprob_abs_diff")


def check_validations(report: dict[str, Any], checks: Checks) -> None:
    sources = {run["validation"]["runtime_scalar_logprob"]["evidence_source"] for run in report["runs"]}
    checks.that(len(sources) == 1, "runtime_scalar_logprob.evidence_source", "differs between runs of one writer")
    for run in report["runs"]:
        v, place = run["validation"], f"{run['run_id']}: validation"
        checks.equal(f"{place}.run_id", v["run_id"], run["run_id"])
        clean = not v["errors"] and all(v[part]["passed"] for part in PARTS)
        checks.equal(f"{place}.passed", v["passed"], clean)
        if is_ours(report):
            checks.equal(f"{place}.layout", v["layout"], run["layout"])
            own = [error for part in PARTS for error in v[part]["errors"]]
            checks.equal(f"{place}.errors", v["errors"][len(v["errors"]) - len(own) :], own)
        _check_graph(v["cudagraph"], f"{place}.cudagraph", checks)
        _check_rows(run, v["runtime_scalar_logprob"], place, checks)
        _check_logprobs(run, v, place, checks)
        _check_artifacts(run, v, place, checks)


def _check_graph(graph: dict[str, Any], place: str, checks: Checks) -> None:
    if "checks" not in graph:  # the schema says that it then holds a reason and claims nothing
        return
    checks.equal(f"{place}.passed", graph["passed"], all(graph["checks"].values()))
    sizes = graph["expected_capture_sizes"]
    checks.that(sizes and sizes == sorted(set(sizes)), f"{place}.expected_capture_sizes", "are not sizes in ascending order")


def _check_rows(run: dict[str, Any], scalar: dict[str, Any], place: str, checks: Checks) -> None:
    """Counts of tokens and mismatches of each step, from its metrics up to the totals."""
    place = f"{place}.runtime_scalar_logprob"
    ours = "chain" in run  # the published metrics are means over samples, ours are counts
    expected = []
    for step in [step for own in iterations(run) for step in own]:
        m = run["steps"][step]
        samples, factor = m[BATCH], 1 if ours else m[BATCH]
        row = {
            "active_token_count": m[NUMEL] * factor,
            "bitwise_mismatch_count": m[MISMATCH] * factor,
            "max_abs_dlogp": m[MAX_ABS_DIFF],
            "mean_abs_dlogp": m[ABS_DIFF],
            "step": int(step),
            "vime_mean_active_tokens_per_sample": m[NUMEL] * factor / samples,
            "vime_mean_mismatch_count_per_sample": m[MISMATCH] * factor / samples,
        }
        expected.append(row)
    checks.equal(f"{place}.rows: steps", [row["step"] for row in scalar["rows"]], [row["step"] for row in expected])
    for row, wanted in zip(scalar["rows"], expected):
        for name, value in wanted.items():
            checks.equal(f"{place}.rows: {name} of step {wanted['step']}", row[name], value)
    mismatches = sum(row["bitwise_mismatch_count"] for row in expected)
    checks.equal(
        f"{place}.total_active_token_exposure", scalar["total_active_token_exposure"], sum(row["active_token_count"] for row in expected)
    )
    checks.equal(f"{place}.bitwise_zero", scalar["bitwise_zero"], mismatches == 0)
    several = any(len(own) > 1 for own in iterations(run))  # later steps of an iteration train on another policy's tokens
    checks.equal(f"{place}.passed", scalar["passed"], not scalar["errors"] and (mismatches == 0 or several))


def _check_logprobs(run: dict[str, Any], v: dict[str, Any], place: str, checks: Checks) -> None:
    """Rollout against old logprobs, over all tokens."""
    own, rows, place = v["train_rollout_logprob"], v["runtime_scalar_logprob"]["rows"], f"{place}.train_rollout_logprob"
    mismatches = own["bitwise_mismatch_count"]
    checks.equal(f"{place}.passed", own["passed"], not own["errors"])
    checks.that(own["passed"] <= (mismatches == 0), f"{place}.passed", f"although {mismatches} logprobs differ")
    checks.equal(f"{place}.mismatch_count", own["mismatch_count"], mismatches)
    checks.equal(f"{place}.bitwise_equal", own["bitwise_equal"], mismatches == 0)
    checks.equal(f"{place}.require_exact", own["require_exact"], True)
    if own["passed"]:  # every token was in the artifacts
        checks.equal(f"{place}.element_count", own["element_count"], int(sum(row["active_token_count"] for row in rows)))
        checks.equal(f"{place}.sample_count", own["sample_count"], sum(row["sample_count"] for row in run["tokens"].values()))
    checks.that(mismatches <= own["element_count"], f"{place}.bitwise_mismatch_count", "is above the number of logprobs")
    if mismatches == 0:
        checks.equal(f"{place}.torch_equal", own["torch_equal"], True)
        for name in DISTANCES:
            checks.equal(f"{place}.{name}, where all bits are equal", own[name], 0.0)
    if "current_rollout_mismatch_count" in own and own["passed"]:
        counted = int(sum(row["bitwise_mismatch_count"] for row in rows))
        checks.equal(f"{place}.current_rollout_mismatch_count", own["current_rollout_mismatch_count"], counted)
        if mismatches == 0:  # old = rollout
            checks.equal(f"{place}.current_old_mismatch_count", own["current_old_mismatch_count"], counted)
    equal_means = all(row["mean_abs_dlogp"] == 0 for row in rows)
    checks.that(
        mismatches or equal_means, f"{place}.bitwise_mismatch_count", "is 0 although a step's old logprobs differ from the rollout's"
    )


def _check_artifacts(run: dict[str, Any], v: dict[str, Any], place: str, checks: Checks) -> None:
    artifacts, offline = v["train_rollout_logprob"]["artifacts"], v["offline_tensor_comparison"]
    checks.equal(f"{place}.offline_tensor_comparison.artifact_count", offline["artifact_count"], len(artifacts))
    checks.that(offline["comparable_artifact_count"] <= len(artifacts), f"{place}.offline_tensor_comparison", "compared more than there is")
    if v["train_rollout_logprob"]["passed"]:
        checks.equal(f"{place}.comparable_artifact_count", offline["comparable_artifact_count"], len(artifacts))
    checks.equal(f"{place}.offline_tensor_comparison.status", offline["status"], "available" if artifacts else "unavailable")
    checks.equal(f"{place}.offline_tensor_comparison.reason", offline["reason"], None if artifacts else "no sidecars")
    if "chain" not in run:
        expected = _published_names(run, artifacts)
    elif v["passed"] and checks.equal(f"{place}.artifacts: number", len(artifacts), sum(_calls(run)) * world_size(run)):
        expected = _names(run)
    else:
        expected = sorted(set(artifacts))
    checks.equal(f"{place}.train_rollout_logprob.artifacts", artifacts, expected)


def _calls(run: dict[str, Any]) -> list[int]:
    """Of each rank, by iteration."""
    layout = run["execution"]["layout"]
    return [len(steps) * micro_batches(layout, int(run["steps"][steps[0]][BATCH])) for steps in iterations(run)]


def _names(run: dict[str, Any]) -> list[str]:
    """A file for each rank and call of each iteration."""
    places = ((i, rank, call) for i, calls in enumerate(_calls(run), 1) for rank in range(world_size(run)) for call in range(calls))
    return [f"i{i:04d}/sidecars/rank{rank:05d}.call{call:08d}.safetensors" for i, rank, call in places]


def _published_names(run: dict[str, Any], artifacts: list[str]) -> list[str]:
    """The folder of the first one, with the run's name in it, and a file for each trained rank and step."""
    folder = artifacts[0].rpartition("/")[0] if artifacts else ""
    name = run["run_id"]
    if f"/{name}/" not in folder:
        return [f"a folder of {name}"]
    ranks = run["validation"]["runtime_readbacks"]["frameworks"].get("megatron/training", {}).get("readback_count", 0)
    return [f"{folder}/rank{rank:05d}.call{call:08d}.pt" for rank in range(ranks) for call in range(len(run["steps"]))]

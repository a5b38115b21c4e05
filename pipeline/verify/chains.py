"""The hash chain of each run: prompts -> ... -> weights, iteration by iteration, up to the result digest."""

from __future__ import annotations

from typing import Any

from .checks import Checks
from .document import sha256
from .metrics import iterations

# Causal order inside an iteration; None marks where the optimizer steps come, each with STEP_QUANTITIES.
QUANTITIES = (
    "prompts", "tokens", "rollout_logprob", "reference_logprob", "old_logprob", "current_logprob", "entropy", "rewards", "advantages",
    "rollout_metrics", None, "exp_avg", "exp_avg_sq", "weights",
)  # fmt: skip
STEP_QUANTITIES = ("metrics", "gradients", "gradient_norm")
PARENTS = {
    "prompts": [],
    "tokens": ["prompts", "previous.weights"],
    "rollout_logprob": ["tokens", "previous.weights"],
    "rewards": ["prompts", "tokens"],
    "rollout_metrics": ["tokens", "rewards"],
    "reference_logprob": ["tokens", "first.weights"],
    "old_logprob": ["tokens", "previous.weights"],
    "current_logprob": ["tokens", "previous.weights"],
    "entropy": ["tokens", "previous.weights"],
    "advantages": ["rewards"],
    "metrics": ["rollout_logprob", "reference_logprob", "old_logprob", "current_logprob", "entropy", "advantages"],
    "gradients": ["tokens", "current_logprob", "old_logprob", "reference_logprob", "advantages", "previous.weights"],
    "gradient_norm": ["gradients"],
    "exp_avg": ["gradients", "gradient_norm", "previous.exp_avg"],
    "exp_avg_sq": ["gradients", "gradient_norm", "previous.exp_avg_sq"],
    "weights": ["exp_avg", "exp_avg_sq", "previous.weights"],
}
GRADIENT_NORM = "train/grad_norm"
ARRAYS = 13  # tensors of an iteration's rollout, reference and logprob files that are links of the chain


def link_digest(parts: dict[str, str]) -> str | None:
    """Of the hash, or exact hexadecimal value, of each part."""
    return sha256(parts) if parts else None


def chain_digest(element: dict[str, Any]) -> str:
    return sha256({key: value for key, value in element.items() if key != "digest"})


def places(iteration: int, steps: list[str]) -> list[tuple[int, str | None, str]]:
    """(iteration, step, quantity) of an iteration's links in causal order."""
    found: list[tuple[int, str | None, str]] = []
    for quantity in QUANTITIES:
        if quantity is None:
            found += [(iteration, step, name) for step in steps for name in STEP_QUANTITIES]
        else:
            found.append((iteration, None, quantity))
    return found


def digest_at(run: dict[str, Any], iteration: int, step: str | None, quantity: str) -> str | None:
    element = run["chain"][iteration]
    return (element["quantities"] if step is None else element["steps"].get(step, {})).get(quantity)


def check_chains(report: dict[str, Any], checks: Checks) -> None:
    checks.equal("chain_parents", report["chain_parents"], PARENTS)
    for run in report["runs"]:
        place, previous = f"{run['run_id']}: chain", None
        for number, element in enumerate(run["chain"]):
            where = f"{place} of iteration {number}"
            checks.equal(f"{where}: iteration", element["iteration"], number)
            checks.equal(f"{where}: previous", element["previous"], previous)
            checks.equal(f"{where}: digest", element["digest"], chain_digest(element))
            previous = element["digest"]
            quantities = {"weights"} if number == 0 else {name for name in QUANTITIES if name}
            checks.equal(f"{where}: quantities", sorted(element["quantities"]), sorted(quantities))
            checks.that(bool(element["steps"]) == (number > 0), f"{where}: steps", "are none, or of the checkpoint")
            for step, links in element["steps"].items():
                checks.equal(f"{where}: step {step}", sorted(links), sorted(STEP_QUANTITIES))
        checks.equal(f"{run['run_id']}: result_digest", run["result_digest"], previous)
        if run["validation"]["passed"]:
            checks.equal(f"{run['run_id']}: validation.file_hashes", run["validation"]["file_hashes"]["result_digest"], previous)
        _check_values(run, checks)


def _check_values(run: dict[str, Any], checks: Checks) -> None:
    """Metrics are in the report themselves, so that their links can be computed again."""
    for number, steps in enumerate(iterations(run), 1):
        heads = {name: value for name, value in run["steps"].get(steps[0], {}).items() if name.startswith("rollout/")} if steps else {}
        expected = {(None, "rollout_metrics"): heads}
        for step in steps:
            own = {name: value for name, value in run["steps"].get(step, {}).items() if name.startswith("train/")}
            norm = {GRADIENT_NORM: own.pop(GRADIENT_NORM)} if GRADIENT_NORM in own else {}
            expected |= {(step, "metrics"): own, (step, "gradient_norm"): norm}
        for (step, quantity), values in expected.items():
            digest = link_digest({name: float(value).hex() for name, value in values.items()})
            where = f"{run['run_id']}: {quantity} of iteration {number}" + (f", step {step}" if step else "")
            checks.equal(where, digest_at(run, number, step, quantity), digest)


def check_links(report: dict[str, Any], checks: Checks) -> None:
    """The hashes of the comparison's sections are those of the runs' chains."""
    runs = report["runs"]

    def expect(place: str, hashes: list[str], iteration: int, quantity: str, step: str | None = None) -> None:
        checks.equal(f"{place}: {quantity}", hashes, [digest_at(run, iteration, step, quantity) for run in runs])

    for number, row in enumerate(report["all_parameter_hash_comparisons"]):
        expect(f"all_parameter_hash_comparisons {row['version']}", row["sha256"], number, "weights")
    for row in report["gradient_hash_comparisons"]:
        expect(f"gradient_hash_comparisons of step {row['step']}", row["sha256"], row["iteration"], "gradients", str(row["step"]))
    for number, row in enumerate(report["adam_state_comparisons"], 1):
        for name in ("exp_avg", "exp_avg_sq"):
            expect(f"adam_state_comparisons {row['version']}", row[name]["sha256"], number, name)
    for row in report["logprob_comparisons"]:
        for name, quantity in row["quantities"].items():
            expect(f"logprob_comparisons of iteration {row['iteration']}", quantity["sha256"], row["iteration"], name)


def check_totals(report: dict[str, Any], checks: Checks) -> None:
    """How much was compared, counted again from the sections."""
    runs, totals = report["runs"], report["totals"]
    number = len(runs[0]["chain"]) - 1
    checks.equal("totals.layouts", totals["layouts"], len(runs))
    checks.equal("totals.iterations", totals["iterations"], number)
    if not all(run["validation"]["passed"] for run in runs):  # then files may be missing
        return
    active = sum(row["active_token_count"] for run in runs for row in run["validation"]["runtime_scalar_logprob"]["rows"])
    checks.equal("totals.logprobs", totals["logprobs"], int(4 * active))  # rollout, reference, old, current
    gradients = sum(row["tensor_count"] for row in report["gradient_hash_comparisons"])
    weights = sum(row["tensor_count"] for row in report["all_parameter_hash_comparisons"])
    moments = sum(row[name]["tensor_count"] for row in report["adam_state_comparisons"] for name in ("exp_avg", "exp_avg_sq"))
    stored = ARRAYS * number + weights + moments
    for run in runs:
        checks.equal(f"{run['run_id']}: validation.file_hashes.tensors_read", run["validation"]["file_hashes"]["tensors_read"], stored)
    checks.equal("totals.tensors", totals["tensors"], len(runs) * (stored + gradients))

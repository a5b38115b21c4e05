"""All runs of an experiment side by side: equal in every bit, or the first place where they part.

Every run is held against one oracle (layout tp1cp1dp1, else the first run). Equality is that of sha256 over the bytes in the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.digest import write_json
from pipeline.evidence import sections
from pipeline.evidence.chain import PARENTS, Evidence, RunFiles, read_evidence
from pipeline.evidence.first_difference import find_first_difference
from pipeline.evidence.run_summary import completions, count_logprobs, steps, token_logprobs, tokens
from pipeline.evidence.validation import check_schema

SCHEMA_VERSION = "lockstep.comparison.v1"
ORACLE_LAYOUT = "tp1cp1dp1"
SUMMARY_RUNS = 8  # that the one-line summary names


@dataclass(frozen=True)
class RunRecord:
    """One run as the comparison takes it in."""

    files: RunFiles
    validation: dict[str, Any]
    execution: dict[str, Any]  # the execution half of its configuration
    performance: dict[str, Any]
    executed: dict[str, str] | None = None  # stage -> "executed" | "cached", where known


@dataclass(frozen=True)
class ExperimentId:
    name: str
    digest: str
    case: str
    expected_digest: str | None = None  # the golden digest, where one is stated


def compare(
    runs: Sequence[RunRecord], experiment: ExperimentId, environment: dict[str, Any] | None = None, verification: str = "cached"
) -> dict[str, Any]:
    """The comparison record. Raises ValueError without runs; a bad run is a verdict, not an exception.

    environment: what env.json says of this machine's packages; verification: "fresh" when nothing of it came from a cache.
    """
    if not runs:
        raise ValueError(f"experiment {experiment.name}: no runs to compare")
    cache: dict = {}
    evidence = [read_evidence(run.files, cache) for run in runs]
    oracle = next((i for i, run in enumerate(runs) if run.validation["layout"] == ORACLE_LAYOUT), 0)
    difference = find_first_difference(evidence, oracle)
    reasons = find_reasons(runs, evidence, difference, experiment)
    verdict = "different" if reasons else "identical" if len(runs) > 1 else "alone"
    iterations = range(1, sections.num_iterations(evidence) + 1)
    updates = sections.optimizer_steps(evidence)
    return {
        "adam_state_comparisons": [sections.adam_state(evidence, i) for i in iterations],
        "all_parameter_hash_comparisons": [sections.parameters(evidence, i) for i in (0, *iterations)],
        "case": experiment.case,
        "chain_parents": {name: list(parents) for name, parents in PARENTS.items()},
        "environment": environment,
        "expected_digest": experiment.expected_digest,
        "experiment": experiment.name,
        "experiment_digest": experiment.digest,
        "first_difference": difference and {**difference, "readbacks": [ran(run.validation) for run in runs_of(difference, runs)]},
        "gradient_hash_comparisons": [sections.gradients(evidence, *place) for place in updates],
        "gradient_norm_comparisons": [sections.gradient_norm(evidence, *place) for place in updates],
        "logprob_comparisons": [sections.logprobs(evidence, i) for i in iterations],
        "metric_comparisons": sections.metric_comparisons(evidence),
        "oracle": runs[oracle].files.key,
        "reasons": reasons,
        "result_digest": evidence[oracle].result_digest if verdict != "different" else None,
        "runs": [run_section(run, own, experiment.name) for run, own in zip(runs, evidence)],
        "schema_version": SCHEMA_VERSION,
        "token_logprobs": token_logprobs(runs[oracle].files),
        "tokens_equal": sections.tokens_equal(evidence),
        "totals": totals(evidence),
        "verdict": verdict,
        "verification": verification,
    }


def runs_of(difference: dict[str, Any], runs: Sequence[RunRecord]) -> list[RunRecord]:
    return [run for key in difference["runs"] for run in runs if run.files.key == key]


def ran(validation: dict[str, Any]) -> dict[str, Any]:
    """What a run's processes reported, side by side with another's: {side: {module: backend ids}, ...} and the kernel builds."""
    frameworks = validation["runtime_readbacks"]["frameworks"]
    modules = {side: {name: module["backend_ids"] for name, module in own["modules"].items()} for side, own in frameworks.items()}
    return {"kernel_builds": {side: own["kernel_builds"] for side, own in frameworks.items()}, "modules": modules}


def totals(evidence: list[Evidence]) -> dict[str, int]:
    """How much was held against the oracle."""
    links = [link for own in evidence for link in own.links]
    return {
        "iterations": sections.num_iterations(evidence),
        "layouts": len(evidence),
        "logprobs": sum(count_logprobs(own.files) for own in evidence),
        "tensors": sum(len(link.parts) for link in links if link.source or link.quantity == "gradients"),
    }


def write_comparison(path: Path, comparison: dict[str, Any]) -> None:
    check_schema("comparison", comparison)
    write_json(path, comparison)


def summary_line(comparison: dict[str, Any]) -> str:
    """The verdict as the command prints it."""
    runs = comparison["runs"]
    layouts = ", ".join(run["label"] for run in runs[:SUMMARY_RUNS]) + (", …" if len(runs) > SUMMARY_RUNS else "")
    match comparison["verdict"]:
        case "identical":
            return f"identical: {len(runs)} layouts ({layouts}), result digest {comparison['result_digest']}"
        case "alone":
            return f"alone: one layout ({layouts}), nothing to compare it with, result digest {comparison['result_digest']}"
        case _:
            return f"different: {comparison['reasons'][0]}"


def find_reasons(runs: Sequence[RunRecord], evidence: list[Evidence], difference: dict | None, experiment: ExperimentId) -> list[str]:
    """Why the verdict is not "identical", the plainest first; empty when it is."""
    reasons = [difference["text"]] if difference else []
    for run, own in zip(runs, evidence):
        errors = run.validation["errors"]
        if run.validation["run_id"] != run.files.key:
            reasons.append(f"validation of {run.files.key} is that of {run.validation['run_id']}")
        if not run.validation["passed"]:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            reasons.append(f"validation of {run.files.key} failed: {errors[0] if errors else 'no reason given'}{more}")
        seen = run.validation["file_hashes"]["result_digest"]
        if seen != own.result_digest:
            reasons.append(
                f"files of {run.files.key} changed after its validation (result digest {seen[:12]}..., now {own.result_digest[:12]}...)"
            )
        reasons += [f"{run.files.key}: {problem}" for problem in own.problems if problem not in errors]
    digests = {own.result_digest for own in evidence}
    if not reasons and len(digests) > 1:  # cannot happen while the digest covers what find_first_difference walks over
        reasons.append(f"result digests differ: {', '.join(sorted(digests))}")
    expected = experiment.expected_digest
    if not reasons and expected and digests != {expected}:
        reasons.append(f"all runs agree on result digest {evidence[0].result_digest}, but {expected} is expected")
    return reasons


def run_section(run: RunRecord, own: Evidence, experiment: str) -> dict[str, Any]:
    return {
        "chain": own.chain,
        "completions": completions(run.files),
        "executed_or_cached": run.executed,
        "execution": run.execution,
        "label": run.files.key.removeprefix(f"{experiment}-"),
        "layout": run.validation["layout"],
        "performance": run.performance,
        "result_digest": own.result_digest,
        "run_id": run.files.key,
        "steps": steps(run.files),
        "tokens": tokens(run.files),
        "validation": run.validation,
    }

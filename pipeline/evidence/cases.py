"""The case matrix: experiments that differ in their kernels only, side by side. Which module breaks what, and what does each cost?

Every case is held against R/R in the same layout: the quantities that are other bits, the tokens on which trainer and rollout
disagree, and ratios of time measured in the same sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.digest import write_bytes, write_json

SCHEMA_VERSION = "lockstep.cases.v1"
BASELINE = "R/R"
COSTS = {"rollout": "perf/rollout_time", "log_probs": "perf/log_probs_time", "actor_train": "perf/actor_train_time"}


def case_matrix(comparisons: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """{schema_version, baseline, cases: [...]}; comparisons: one record per case. ValueError without the baseline."""
    by_case = {c["case"]: c for c in comparisons}
    if BASELINE not in by_case:
        raise ValueError(f"no comparison of case {BASELINE} to hold {', '.join(by_case)} against")
    baseline = _oracle(by_case[BASELINE])
    return {"schema_version": SCHEMA_VERSION, "baseline": BASELINE, "cases": [_case(c, baseline) for c in by_case.values()]}


def _case(comparison: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    run = _oracle(comparison)
    rows = run["validation"]["runtime_scalar_logprob"]["rows"]
    differences = [row["max_abs_dlogp"] for row in rows if row["max_abs_dlogp"] is not None]
    return {
        "case": comparison["case"],
        "costs": {name: _ratio(run, baseline, key) for name, key in COSTS.items()},
        "differs_from_baseline": other_quantities(run, baseline),
        "experiment": comparison["experiment"],
        "layout": run["label"],
        "max_abs_dlogp": max(differences, default=None),
        "mismatched_tokens": sum(row["bitwise_mismatch_count"] for row in rows),
        "modules": own_modules(run),
        "tokens": sum(row["active_token_count"] for row in rows),
        "verdict": comparison["verdict"],
    }


def _oracle(comparison: dict[str, Any]) -> dict[str, Any]:
    return next(run for run in comparison["runs"] if run["run_id"] == comparison["oracle"])


def other_quantities(run: dict[str, Any], baseline: dict[str, Any]) -> list[str]:
    """Quantities of the first iteration that are other bits than the baseline's, in causal order: later ones inherit every difference."""
    own, wanted = (_first_iteration(r["chain"]) for r in (run, baseline))
    return [name for name, digest in wanted.items() if own.get(name) != digest]


def _first_iteration(chain: list[dict[str, Any]]) -> dict[str, Any]:
    element = next(element for element in chain if element["iteration"] == 1)
    steps = {name: digest for step in element["steps"].values() for name, digest in step.items()}
    return {**element["quantities"], **steps}


def own_modules(run: dict[str, Any]) -> dict[str, list[str]]:
    """{side: modules that ran PyTorch's own kernels}, from what the processes reported."""
    frameworks = run["validation"]["runtime_readbacks"]["frameworks"]
    return {
        side: sorted(name for name, module in own["modules"].items() if "torch" in module["implementations"])
        for side, own in frameworks.items()
    }


def _ratio(run: dict[str, Any], baseline: dict[str, Any], key: str) -> float | None:
    """Of the shortest times: the first iteration warms up. None where a time is missing (cached)."""
    own, base = ([step[key] for step in r["performance"].values() if step.get(key)] for r in (run, baseline))
    return min(own) / min(base) if own and base else None


def table(matrix: dict[str, Any]) -> list[str]:
    """The matrix as lines of text."""
    rows: list[tuple[str, ...]] = [
        ("case", "PyTorch's own: training", "rollout", "other tokens", "max |dlogp|", "breaks first", "rollout x", "train x")
    ]
    for case in matrix["cases"]:
        modules, costs = case["modules"], case["costs"]
        largest = "-" if case["max_abs_dlogp"] is None else f"{case['max_abs_dlogp']:.2g}"
        rows.append(
            (
                case["case"],
                " ".join(modules["deepspeed/training"]) or "-",
                " ".join(modules["lockstep/rollout"]) or "-",
                f"{case['mismatched_tokens']:g} of {case['tokens']:g}",
                largest,
                next(iter(case["differs_from_baseline"]), "nothing"),
                *("-" if costs[name] is None else f"{costs[name]:.2f}" for name in ("rollout", "actor_train")),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def write_case_matrix(folder: Path, comparisons: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """cases.json and cases.html in `folder`."""
    import jinja2

    matrix = case_matrix(comparisons)
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    page = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template("cases.html.jinja")
    write_json(folder / "cases.json", matrix)
    write_bytes(folder / "cases.html", page.render(m=matrix).encode())
    return matrix

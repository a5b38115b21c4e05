"""Is it a report at all? By the schemas in this folder: that of the pipeline, closed where it is open, or that of the published report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import schema
from .checks import Checks
from .layouts import rollout_size

MAX_RANKS = 1 << 16  # they are counted one by one
CONDITIONS = ("if", "then", "else")  # of a schema's outermost level: what follows from a value, not whether it is a report


def is_ours(report: dict[str, Any]) -> bool:
    return "schema_version" in report


def check(report: Any) -> None:
    """ValueError, of one line, when it is no comparison report."""
    if not isinstance(report, dict):
        raise ValueError(f"no report: holds a {type(report).__name__} where an object is expected")
    found = list(_errors(report))
    if found:
        raise ValueError(f"no report: {found[0]}" + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""))


def _errors(report: dict[str, Any]) -> Iterator[str]:
    if not is_ours(report):
        yield from _fit(report, "published", "report")
        return
    found = list(_fit(report, "comparison", "report"))
    yield from found
    if found:
        return
    found = list(_fit(report, "fields", "report"))
    yield from found
    for i, run in enumerate(report["runs"] if not found else ()):
        layout = run["execution"]["layout"]
        if layout["tp"] * layout["cp"] * layout["dp"] > MAX_RANKS or rollout_size(layout) > MAX_RANKS:
            yield f"report.runs.{i}.execution.layout: has more than {MAX_RANKS} ranks"
    for i, run in enumerate(report["runs"]):
        yield from _fit(run["validation"], "validation", f"report.runs.{i}.validation")


def _fit(value: Any, name: str, place: str) -> Iterator[str]:
    document = schema.load(name)
    yield from schema.errors(value, {key: own for key, own in document.items() if key not in CONDITIONS}, document, place)


def check_conditions(report: dict[str, Any], checks: Checks) -> None:
    """What the schemas say that follows: a verdict without reasons is "identical", a validation without errors has passed."""
    values = [(report, "comparison", "report"), *((run["validation"], "validation", run["run_id"]) for run in report["runs"])]
    for value, name, place in values:
        document = schema.load(name)
        found = list(schema.errors(value, {key: document[key] for key in CONDITIONS}, document, place))
        checks.that(not found, place, f"contradicts itself: {'; '.join(found)}")

"""The comparison as one self-contained HTML page: the verdict first, then what it rests on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.evidence import curves
from pipeline.evidence.compare import summary_line

QUANTITY_NAMES = {
    "prompts": "prompts",
    "tokens": "tokens",
    "rollout_logprob": "rollout logprobs",
    "rewards": "rewards",
    "reference_logprob": "reference logprobs",
    "old_logprob": "old logprobs",
    "current_logprob": "current logprobs",
    "entropy": "entropies",
    "advantages": "advantages",
    "rollout_metrics": "rollout metrics",
    "metrics": "training metrics",
    "gradients": "gradients",
    "gradient_norm": "gradient norm",
    "exp_avg": "Adam first moment",
    "exp_avg_sq": "Adam second moment",
    "weights": "weights",
}
TIMES = ("perf/step_time", "perf/train_wait_time", "perf/ref_log_probs_time", "perf/log_probs_time", "perf/actor_train_time")


def render(comparison: dict[str, Any]) -> str:
    """HTML of a comparison record. Every text of a run is escaped: completions are whatever a model says."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"short": lambda digest: f"{digest[:12]}…" if digest else "-", "visible": visible}
    markup = jinja2.utils.markupsafe.Markup
    runs = comparison["runs"]
    oracle = next(run for run in runs if run["run_id"] == comparison["oracle"])
    in_front = [oracle, *(run for run in runs if run is not oracle)]
    return environment.get_template("comparison.html.jinja").render(
        c=comparison,
        d=comparison["first_difference"],
        summary=summary_line(comparison),
        matrix=matrix(comparison),
        plots=[(name, markup(svg)) for name, svg in curves.plots(in_front)],
        legend=[(run["label"], stroke["color"]) for run, stroke in zip(in_front, curves.strokes([[]] * len(runs)))],
        completions=oracle["completions"],
        times=[(name.removeprefix("perf/"), [times(run, name) for run in runs]) for name in TIMES],
        oracle=oracle,
        builds=sorted(
            {b for run in runs for side in run["validation"]["runtime_readbacks"]["frameworks"].values() for b in side["kernel_builds"]}
        ),
    )


def matrix(comparison: dict[str, Any]) -> list[tuple[str, list[tuple[bool, str]]]]:
    """[(quantity, [(equal to the oracle's, what the cell says) for each run])], quantities in causal order."""
    oracle = next(run for run in comparison["runs"] if run["run_id"] == comparison["oracle"])
    rows = []
    for quantity, name in QUANTITY_NAMES.items():
        wanted = _values(oracle, quantity)
        if not wanted:
            continue
        cells = []
        for run in comparison["runs"]:
            values = _values(run, quantity)
            apart = [i for i, value in wanted.items() if value is None or values.get(i) != value]
            cells.append((not apart, f"from iteration {apart[0]}" if apart else f"{len(wanted)} of {len(wanted)}"))
        rows.append((name, cells))
    return rows


def _values(run: dict[str, Any], quantity: str) -> dict[int, Any]:
    """{iteration: digest} (of all optimizer steps, for what there is one of per step); None where something is missing."""
    values: dict[int, Any] = {}
    for element in run["chain"]:
        own = [element["quantities"][quantity]] if quantity in element["quantities"] else []
        own += [step[quantity] for step in element["steps"].values() if quantity in step]
        if own:
            values[element["iteration"]] = None if None in own else own
    return values


def times(run: dict[str, Any], name: str) -> str:
    """First and last known value of a timing."""
    values = [step[name] for step in run["performance"].values() if step.get(name) is not None]
    if not values:
        return "-"
    return f"{values[0]:.3g} s" if len(values) == 1 else f"{values[0]:.3g} … {values[-1]:.3g} s"


def visible(text: str) -> str:
    """Control characters as \\x1b: models write them, and a browser shows empty boxes or nothing."""
    return "".join(c if c in "\n\t" or 32 <= ord(c) < 127 or ord(c) >= 160 else f"\\x{ord(c):02x}" for c in text)

"""The comparison as one self-contained HTML page: the verdict first, then what it rests on."""

from __future__ import annotations

import io
from typing import Any

from pipeline.compare import summary_line

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
CURVES = ("rollout/reward_mean", "train/loss", "train/kl_loss", "train/entropy_loss", "train/grad_norm", "rollout/response_length_mean")
TIMES = ("perf/step_time", "perf/train_wait_time", "perf/ref_log_probs_time", "perf/log_probs_time", "perf/actor_train_time")


def render(comparison: dict[str, Any]) -> str:
    """HTML of a comparison record. Every text of a run is escaped: completions are whatever a model says."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["short"] = lambda digest: f"{digest[:12]}…" if digest else "-"
    runs = comparison["runs"]
    oracle = next(run for run in runs if run["run_id"] == comparison["oracle"])
    return environment.from_string(TEMPLATE).render(
        c=comparison,
        d=comparison["first_difference"],
        summary=summary_line(comparison),
        matrix=matrix(comparison),
        curves=jinja2.utils.markupsafe.Markup(curves_svg(runs)),
        completions=oracle["completions"],
        times=[(name.removeprefix("perf/"), [times(run, name) for run in runs]) for name in TIMES],
        oracle=oracle,
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


def curves_svg(runs: list[dict[str, Any]]) -> str:
    """Small plots of the main metrics. Equal curves lie on top of each other: the first run is a wide band, the others thin lines on it."""
    import matplotlib
    from matplotlib.figure import Figure  # no pyplot: no backend, no global state

    names = [name for name in CURVES if any(name in step for run in runs for step in run["steps"].values())]
    if not names:
        return ""
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    # fonttype none keeps text as text; the salt makes the ids in the file the same every time
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lockstep", "font.size": 8}):
        figure = Figure(figsize=(3.2 * columns, 1.9 * lines), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False).ravel()
        for axis, name in zip(axes, names):
            for i, run in enumerate(runs):
                points = sorted((int(step), float(values[name])) for step, values in run["steps"].items() if name in values)
                # dashes of different runs take turns, so that on a common curve each of them still shows
                style: dict[str, Any] = {"linewidth": 1, "linestyle": (3 * i, (3, 3 * max(1, len(runs) - 2)))}
                if i == 0:
                    style = {"linewidth": 6, "alpha": 0.3, "marker": "."}
                axis.plot([x for x, _ in points], [y for _, y in points], label=run["layout"], **style)
            axis.set_title(name)
            axis.xaxis.get_major_locator().set_params(integer=True)
        for axis in axes[len(names) :]:
            axis.remove()
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(len(runs), 6), frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]  # inside HTML there is no place for the XML declaration


TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ c.verdict }}: {{ c.experiment }}</title>
<style>
:root { color-scheme: light; font: 14px/1.5 system-ui, sans-serif; color: #1c1c1c; }
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin: 0; font-size: 1.6rem; }
h2 { margin: 2rem 0 .5rem; font-size: 1.1rem; }
code, .hash { font: .85em ui-monospace, monospace; overflow-wrap: anywhere; }
.verdict { padding: 1rem 1.2rem; border-left: .4rem solid; background: #f4f4f4; }
.identical { border-color: #187a3c; } .different { border-color: #b3261e; } .alone { border-color: #8a6d00; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .2rem .7rem; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top; }
.eq { color: #187a3c; } .ne { color: #b3261e; font-weight: 600; }
td.text { white-space: pre-wrap; max-width: 30rem; overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; }
dt { float: left; clear: left; width: 11rem; color: #666; } dd { margin-left: 11rem; }
</style>
</head>
<body>
<div class="verdict {{ c.verdict }}">
<h1>{{ c.verdict }}</h1>
<p>{{ summary }}</p>
{% if c.reasons|length > 1 %}
<ul>
{% for reason in c.reasons[1:9] %}
<li>{{ reason }}</li>
{% endfor %}
{% if c.reasons|length > 9 %}
<li>… {{ c.reasons|length - 9 }} more</li>
{% endif %}
</ul>
{% endif %}
</div>
{% if d %}
<h2>First difference</h2>
<dl>
<dt>where</dt><dd>iteration {{ d.iteration }}{% if d.step is not none %}, optimizer step {{ d.step }}{% endif %}</dd>
<dt>quantity</dt><dd>{{ d.quantity }}</dd>
<dt>tensor and index</dt><dd><code>{{ d.tensor }}{{ d.index if d.index is not none }}</code></dd>
{% for run in d.runs %}
<dt>{{ run }}</dt><dd><code>{{ d["values"][loop.index0] or "missing" }}</code></dd>
{% endfor %}
</dl>
{% endif %}
<h2>What is equal, in every bit</h2>
<p>Each column against {{ oracle.layout }}. A cell counts the iterations (weights: versions) whose sha256 is the same.</p>
<div class="scroll"><table>
<tr><th></th>{% for run in c.runs %}<th>{{ run.layout }}</th>{% endfor %}</tr>
{% for name, cells in matrix %}
<tr>
<th>{{ name }}</th>
{% for equal, text in cells %}
<td class="{{ 'eq' if equal else 'ne' }}">{{ '=' if equal else '≠' }} {{ text }}</td>
{% endfor %}
</tr>
{% endfor %}
<tr>
<th>validation</th>
{% for run in c.runs %}
{% set count = run.validation.errors|length %}
<td class="{{ 'ne' if count else 'eq' }}">{{ "failed, %d errors"|format(count) if count else "passed" }}</td>
{% endfor %}
</tr>
<tr><th>result digest</th>{% for run in c.runs %}<td class="hash">{{ run.result_digest|short }}</td>{% endfor %}</tr>
</table></div>
<h2>Curves</h2>
{{ curves }}
<h2>Completions</h2>
<div class="scroll"><table>
<tr><th>iteration</th><th>prompt</th><th>completion</th><th>reward</th></tr>
{% for row in completions %}
<tr>
<td>{{ row.iteration }}</td><td class="text">{{ row.prompt }}</td>
<td class="text">{{ row.completion }}</td><td>{{ row.reward }}</td>
</tr>
{% else %}
<tr><td colspan="4">none recorded</td></tr>
{% endfor %}
</table></div>
<h2>Time</h2>
<p>First and last step; it describes one execution and enters no digest. A dash: the stage came from the cache.</p>
<div class="scroll"><table>
<tr><th></th>{% for run in c.runs %}<th>{{ run.layout }}</th>{% endfor %}</tr>
{% for name, cells in times %}
<tr><th>{{ name }}</th>{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
<h2>Identity</h2>
<dl>
<dt>experiment</dt><dd>{{ c.experiment }}, kernel case {{ c.case }}</dd>
<dt>experiment digest</dt><dd class="hash">{{ c.experiment_digest }}</dd>
<dt>result digest</dt><dd class="hash">{{ c.result_digest or "none: the runs differ" }}</dd>
</dl>
{% for run in c.runs if not run.validation.passed %}
<h2>Errors of {{ run.run_id }}</h2>
<ul>{% for error in run.validation.errors[:20] %}<li>{{ error }}</li>{% endfor %}</ul>
{% endfor %}
</body>
</html>
"""

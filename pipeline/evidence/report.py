"""The comparison as one self-contained HTML page: the verdict first, then what it rests on."""

from __future__ import annotations

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

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"short": lambda digest: f"{digest[:12]}…" if digest else "-", "visible": visible}
    markup = jinja2.utils.markupsafe.Markup
    runs = comparison["runs"]
    oracle = next(run for run in runs if run["run_id"] == comparison["oracle"])
    in_front = [oracle, *(run for run in runs if run is not oracle)]
    return environment.from_string(TEMPLATE).render(
        c=comparison,
        d=comparison["first_difference"],
        summary=summary_line(comparison),
        matrix=matrix(comparison),
        plots=[(name, markup(svg)) for name, svg in curves.plots(in_front)],
        legend=[(run["layout"], stroke["color"]) for run, stroke in zip(in_front, curves.strokes([[]] * len(runs)))],
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


def visible(text: str) -> str:
    """Control characters as \\x1b: models write them, and a browser shows empty boxes or nothing."""
    return "".join(c if c in "\n\t" or 32 <= ord(c) < 127 or ord(c) >= 160 else f"\\x{ord(c):02x}" for c in text)


TEMPLATE = """{% macro columns() %}
<tr>
<td></td>
{% for run in c.runs %}
<th scope="col">{{ run.layout }}{% if run.run_id == c.oracle %} <small>oracle</small>{% endif %}</th>
{% endfor %}
</tr>
{% endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ c.verdict }}: {{ c.experiment }}</title>
<style>
:root {
  color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif;
  --text: #1c1c1c; --page: #fff; --quiet: #5a5a5a; --line: #d9d9d9; --panel: #f4f4f4; --good: #187a3c; --bad: #b3261e; --mixed: #8a6d00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #e8e8e8; --page: #161616; --quiet: #a8a8a8; --line: #3a3a3a; --panel: #222; --good: #6fcf97; --bad: #ff8a80; --mixed: #e0c050;
  }
}
body { margin: 0; color: var(--text); background: var(--page); }
main { max-width: 70rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { margin: 2rem 0 .5rem; font-size: 1.15rem; overflow-wrap: anywhere; }
p, li { margin: .4rem 0; overflow-wrap: anywhere; }
.note, dt, figcaption small { color: var(--quiet); }
code, .hash { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
.verdict { padding: 1rem 1.2rem; border-left: .4rem solid; background: var(--panel); }
.identical { border-color: var(--good); } .different { border-color: var(--bad); } .alone { border-color: var(--mixed); }
.identical h1 { color: var(--good); } .different h1 { color: var(--bad); } .alone h1 { color: var(--mixed); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; }
th, td { padding: .2rem .7rem .2rem 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap; }
th small { font-weight: normal; color: var(--quiet); }
.grid th:first-child { position: sticky; left: 0; background: var(--page); }
.grid td { font-variant-numeric: tabular-nums; }
.eq { color: var(--good); } .ne { color: var(--bad); font-weight: 600; }
td.text { white-space: pre-wrap; max-width: 34rem; overflow-wrap: anywhere; }
td.text + td.text { min-width: 9rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(18rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; }
svg { display: block; width: 100%; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; list-style: none; }
.legend span { display: inline-block; width: 2rem; height: .35rem; vertical-align: middle; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 0; }
dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
@media (max-width: 40rem) { .grid th { white-space: normal; } dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
</style>
</head>
<body>
<main>
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
<p class="note">Each column against {{ oracle.layout }}. A cell counts the iterations (weights: versions) whose sha256 is the same.</p>
<div class="scroll" role="region" tabindex="0" aria-label="layouts by quantities"><table class="grid">
{{ columns() }}
{% for name, cells in matrix %}
<tr>
<th scope="row">{{ name }}</th>
{% for equal, text in cells %}
<td class="{{ 'eq' if equal else 'ne' }}">{{ '=' if equal else '≠' }} {{ text }}</td>
{% endfor %}
</tr>
{% endfor %}
<tr>
<th scope="row">validation</th>
{% for run in c.runs %}
{% set count = run.validation.errors|length %}
<td class="{{ 'ne' if count else 'eq' }}">{{ "failed, errors: %d"|format(count) if count else "passed" }}</td>
{% endfor %}
</tr>
<tr>
<th scope="row">result digest</th>
{% for run in c.runs %}
<td class="hash" title="{{ run.result_digest }}">{{ run.result_digest|short }}</td>
{% endfor %}
</tr>
</table></div>
<h2>Curves</h2>
<p class="note">By optimizer step. Equal curves lie on top of each other: {{ oracle.layout }} is the wide
band, the others are dashes on it, and a whole line where they differ.</p>
<ul class="legend">
{% for layout, colour in legend %}
<li><span style="background: {{ colour }}" aria-hidden="true"></span> {{ layout }}</li>
{% endfor %}
</ul>
<div class="plots">
{% for name, svg in plots %}
<figure><figcaption>{{ name }}</figcaption>{{ svg }}</figure>
{% endfor %}
</div>
<h2>Completions</h2>
<p class="note">The first of each iteration, by {{ oracle.layout }}.</p>
<div class="scroll" role="region" tabindex="0" aria-label="completions"><table>
<tr>
<th scope="col"><abbr title="iteration">it.</abbr></th><th scope="col">prompt</th><th scope="col">completion</th>
<th scope="col">answer</th><th scope="col">reward</th><th scope="col">tokens</th>
</tr>
{% for row in completions %}
<tr>
<td>{{ row.iteration }}</td><td class="text">{{ row.prompt|visible }}</td><td class="text">{{ row.completion|visible }}</td>
<td>{{ row.answer }}</td><td title="{{ row.reward }}">{{ "%.4g"|format(row.reward) if row.reward is number else row.reward }}</td>
<td>{{ row.num_tokens }}{% if row.finish_reason %}, {{ row.finish_reason }}{% endif %}</td>
</tr>
{% else %}
<tr><td colspan="6">none recorded</td></tr>
{% endfor %}
</table></div>
<h2>Time</h2>
<p class="note">First and last step; it describes one execution and enters no digest. A dash: the stage came from the cache.</p>
<div class="scroll" role="region" tabindex="0" aria-label="times by layout"><table class="grid">
{{ columns() }}
{% for name, cells in times %}
<tr><th scope="row">{{ name }}</th>{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}</tr>
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
</main>
</body>
</html>
"""

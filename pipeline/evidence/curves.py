"""Metrics by optimizer step as small plots for the report: one figure a metric, so that they flow on a phone; legible on any background."""

from __future__ import annotations

import io
import math
import re
from html import escape
from typing import Any

SHOWN = ("rollout/reward_mean", "train/loss", "train/kl_loss", "train/entropy_loss", "train/grad_norm", "rollout/response_length_mean")
COLOURS = ("#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#0072b2")  # Okabe and Ito: apart for colour-blind eyes too
INK = "#808080"  # legible on white and on black
DASH = 3.0

Points = list[tuple[int, float]]


def plots(runs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """[(metric, SVG)] of the metrics that some run has. The oracle comes first in `runs`: see `strokes`."""
    found = []
    for name in SHOWN:
        curves = [_points(run, name) for run in runs]
        if any(curves):
            found.append((name, _plot(name, curves)))
    return found


def strokes(curves: list[Points]) -> list[dict[str, Any]]:
    """How each run's line is drawn: the first is a wide band, the others are dashes on it that take turns, so that on a common curve
    each of them still shows. One that leaves the band is drawn whole: dashes could miss the very step that differs."""
    lines: list[dict[str, Any]] = [{"color": COLOURS[0], "linewidth": 6, "alpha": 0.55}]
    gap = DASH * max(1, len(curves) - 2)
    for i, points in enumerate(curves[1:]):
        dashes = {"linestyle": (DASH * i, (DASH, gap))} if points == curves[0] else {}
        lines.append({"color": COLOURS[1 + i % (len(COLOURS) - 1)], "linewidth": 1.4, **dashes})
    return lines


def _points(run: dict[str, Any], name: str) -> Points:
    """(step, value), without what has no place on an axis."""
    points = sorted((int(step), float(values[name])) for step, values in run["steps"].items() if name in values)
    return [(step, value) for step, value in points if math.isfinite(value)]


def _plot(name: str, curves: list[Points]) -> str:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    style: Any = {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style | dict.fromkeys(("text.color", "axes.edgecolor", "xtick.color", "ytick.color"), INK)):
        figure = Figure(figsize=(3.4, 1.6), layout="constrained")
        axes = figure.subplots()
        for points, stroke in zip(curves, strokes(curves)):
            axes.plot([step for step, _ in points], [value for _, value in points], marker=".", markersize=3, **stroke)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()[file.getvalue().index("<svg ") :]
    size = re.compile(r'(<svg [^>]*?) width="[^"]*"')
    svg = re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", size.sub(r"\1", svg, count=1), count=1)  # the page gives the width
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(in_words(name, curves))}" ', 1)


def in_words(name: str, curves: list[Points]) -> str:
    """The plot for who can't see it."""
    first = next(points for points in curves if points)
    (start, low), (end, high) = first[0], first[-1]
    same = "the same in every layout" if all(points == curves[0] for points in curves) else "not the same in every layout"
    return f"{name}: {low:.4g} at step {start}, {high:.4g} at step {end}; {same}"

"""The page says what the record says, to people with any screen, and asks nobody for anything."""

from __future__ import annotations

from xml.etree import ElementTree

from pipeline.evidence import curves
from pipeline.evidence.report import visible


def run(**series: list[float | str]) -> dict:
    names = {f"train/{name}": values for name, values in series.items()}
    length = max(len(values) for values in names.values())
    return {"steps": {str(i): {name: values[i] for name, values in names.items() if i < len(values)} for i in range(length)}}


def test_a_common_curve_is_a_band_with_dashes_and_one_that_leaves_it_is_drawn_whole():
    same, other = run(loss=[1.0, 0.5, 0.25]), run(loss=[1.0, 0.5, 0.26])
    ((name, svg),) = curves.plots([same, same, other])
    assert name == "train/loss"
    assert "1 at step 0, 0.25 at step 2; not the same in every layout" in svg
    assert "; the same in every layout" in curves.plots([same, same])[0][1]
    band, dashed, whole = curves.strokes([[(0, 1.0)], [(0, 1.0)], [(0, 2.0)]])
    assert band["linewidth"] > dashed["linewidth"]
    assert "linestyle" in dashed and "linestyle" not in band.keys() | whole.keys()


def test_a_plot_is_wellformed_scales_with_the_page_and_is_the_same_twice():
    ((_, svg),) = curves.plots([run(loss=[1.0, 0.5])])
    root = ElementTree.fromstring(svg)
    assert root.attrib["role"] == "img" and root.attrib["aria-label"].startswith("train/loss: ")
    assert "viewBox" in root.attrib and "width" not in root.attrib and "height" not in root.attrib
    assert curves.plots([run(loss=[1.0, 0.5])])[0][1] == svg


def test_points_outside_every_axis_cost_only_themselves():
    """Diverged and constant runs, a run without the metric, a single step."""
    plotted = curves.plots([run(loss=["NaN", 2.0, "Infinity", 2.0], kl_loss=["NaN"]), run(kl_loss=[0.0])])
    assert [name for name, _ in plotted] == ["train/loss", "train/kl_loss"]
    assert "2 at step 1, 2 at step 3" in plotted[0][1]
    assert curves.plots([run(loss=["NaN"])]) == []


def test_control_characters_are_visible_and_text_stays():
    assert visible("a\n\té漢\\\x1b\x7f\x9f") == "a\n\té漢\\\\x1b\\x7f\\x9f"

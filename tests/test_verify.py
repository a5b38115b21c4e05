"""The stand-alone checker: a good report passes, every kind of doctored copy is refused, and what nothing covers is named."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
from synthetic_runs import make_experiment

from pipeline import verify
from pipeline.evidence.compare import ExperimentId, RunRecord, compare
from pipeline.evidence.validation import validate
from pipeline.paths import ROOT


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    experiment = make_experiment(tmp_path_factory.mktemp("verify"))
    runs = [RunRecord(experiment.files(k), validate(cfg, experiment.files(k)), {}, {}) for k, cfg in experiment.configs.items()]
    return json.loads(json.dumps(compare(runs, ExperimentId("tiny", experiment.digest, "R/R", None))))


def faults(report: dict) -> list[str]:
    return verify.verify(report).faults


def test_a_good_report_is_consistent(report):
    checks = verify.verify(report)
    assert checks.faults == []
    assert checks.count > 500


def doctored(report: dict, change) -> list[str]:
    copied = copy.deepcopy(report)
    change(copied)
    return faults(copied)


def swap_weights(report: dict) -> None:
    """The hashes of two versions, in every place of one section."""
    rows = report["all_parameter_hash_comparisons"]
    rows[1]["sha256"], rows[2]["sha256"] = rows[2]["sha256"], rows[1]["sha256"]


def swap_steps_of_one_run(report: dict) -> None:
    steps = report["runs"][1]["steps"]
    steps["0"], steps["1"] = steps["1"], steps["0"]


def swap_in_chain(report: dict) -> None:
    quantities = report["runs"][0]["chain"][1]["quantities"]
    quantities["tokens"], quantities["weights"] = quantities["weights"], quantities["tokens"]


CHANGES = {
    "a digit of a loss": (lambda r: r["runs"][1]["steps"]["0"].update({"train/loss": 0.0030000003}), "train/loss"),
    "a digit of a norm": (lambda r: r["runs"][2]["steps"]["1"].update({"train/grad_norm": 0.20000001788139343}), "norms"),
    "a run dropped": (lambda r: r["runs"].pop(), "expected 2"),
    "a step dropped": (lambda r: r["runs"][1]["steps"].pop("1"), "steps"),
    "a step that is not finite": (lambda r: r["runs"][1]["steps"]["1"].update({"train/loss": float("nan")}), "not finite"),
    "two versions swapped": (swap_weights, "weights weight_v000002"),
    "two steps swapped": (swap_steps_of_one_run, "train/step"),
    "two hashes of a chain swapped": (swap_in_chain, "chain.1.digest"),
    "a failed validation": (lambda r: r["runs"][0]["validation"]["errors"].append("rank 1 is missing"), "passed"),
    "a verdict": (lambda r: r.update(verdict="different"), "verdict"),
    "a mismatch that nobody mentions": (
        lambda r: r["runs"][0]["steps"]["0"].update({verify.MISMATCH: 1.0}), "bitwise_mismatch_count"
    ),
    "a fallback": (
        lambda r: r["runs"][0]["validation"]["runtime_readbacks"]["frameworks"]["lockstep/rollout"]["modules"]["ffn"].update(
            implementations=["lockstep", "torch"]
        ),
        "ffn.implementations",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_doctored_copies_are_refused(report, name):
    change, place = CHANGES[name]
    found = doctored(report, change)
    assert any(place in fault for fault in found), found


def test_the_values_that_nothing_covers_are_named(report):
    names = set(verify.uncovered(report))
    assert "experiment" in names
    for covered in ("result_digest", "runs.*.chain.*.digest", "runs.*.steps.*.train/loss", "gradient_norm_comparisons.*.norms.*"):
        assert covered not in names, covered


def test_the_file_runs_alone_on_the_standard_library(report, tmp_path):
    (tmp_path / "verify.py").write_text((ROOT / "pipeline/verify.py").read_text())
    (tmp_path / "good.json").write_text(json.dumps(report))
    (tmp_path / "bad.json").write_text(json.dumps({**report, "tokens_equal": False}))
    (tmp_path / "none.json").write_text("[]")
    codes = {}
    for name in ("good", "bad", "none"):
        command = [sys.executable, "-I", "-S", str(tmp_path / "verify.py"), str(tmp_path / f"{name}.json")]
        codes[name] = subprocess.run(command, capture_output=True, text=True).returncode
    assert codes == {"good": 0, "bad": 3, "none": 2}

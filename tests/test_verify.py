"""The stand-alone checker: good reports pass, doctored copies are refused, and the folder runs alone on the standard library."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from published_report import published_report
from synthetic_runs import edit_arrays
from verified_runs import TWO, make_project, report_of

from pipeline.config import Layout
from pipeline.paths import ROOT
from pipeline.verify.chains import PARENTS, places
from pipeline.verify.command import main
from pipeline.verify.metrics import MISMATCH
from pipeline.verify.report import verify

WIDE = {"tp1cp1dp1": Layout(), "cp2dp2z3": Layout(cp=2, dp=2, zero=3, packing=False), "tp2": TWO["tp2"]}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return report_of(make_project(tmp_path_factory.mktemp("verify"), WIDE))


def faults(report, change) -> list[str]:
    copied = copy.deepcopy(report)
    change(copied)
    return verify(copied).faults


def test_good_reports_are_consistent(report, tmp_path):
    assert report["verdict"] == "identical" and verify(report).faults == []
    assert verify(published_report()).faults == []
    for name, options in {"alone": {"layouts": {"tp2": TWO["tp2"]}}, "updates": {"num_updates": 2}}.items():
        own = report_of(make_project(tmp_path / name, **options))
        assert verify(own).faults == [] and own["verdict"] == ("alone" if name == "alone" else "identical")


def test_a_report_of_a_difference_is_consistent_and_names_it_rightly(tmp_path):
    synthetic = make_project(tmp_path, iterations=1)
    path = synthetic.paths.run("tiny-tp2") / "weights/weight_v000002/model.safetensors"
    edit_arrays(path, lambda arrays: arrays["model.norm.weight"].view(np.uint32).__iadd__(1))
    own = report_of(synthetic)
    assert own["verdict"] == "different" and verify(own).faults == []
    wrong = {"iteration": 2, "quantity": "exp_avg", "tensor": "lm_head.weight", "unequal_tensors": 2, "index": [9]}
    for change in ({field: value} for field, value in wrong.items()):
        copied = copy.deepcopy(own)
        copied["first_difference"].update(change)
        assert any("first_difference" in fault for fault in verify(copied).faults), change
    assert any("readbacks" in fault for fault in faults(own, lambda r: r["first_difference"]["readbacks"][1]["kernel_builds"].clear()))
    assert any("reasons" in fault for fault in faults(own, lambda r: r["reasons"].pop()))


def test_expected_digests_are_held(tmp_path):
    synthetic = make_project(tmp_path, iterations=1)
    golden = report_of(synthetic)["result_digest"]
    assert verify(report_of(synthetic, golden)).faults == []
    other = report_of(synthetic, "0" * 64)
    assert other["verdict"] == "different" and verify(other).faults == []
    assert any("verdict" in fault for fault in faults(other, lambda r: r.update(expected_digest=golden)))


def swap_hashes(rows, *path):
    """The hashes of the first two rows of a section, for all runs."""
    a, b = rows[0], rows[1]
    for key in path[:-1]:
        a, b = a[key], b[key]
    a[path[-1]], b[path[-1]] = b[path[-1]], a[path[-1]]


def swap_steps(report):
    steps = report["runs"][1]["steps"]
    steps["0"], steps["1"] = steps["1"], steps["0"]


def swap_in_chain(report):
    quantities = report["runs"][0]["chain"][1]["quantities"]
    quantities["tokens"], quantities["weights"] = quantities["weights"], quantities["tokens"]


def first_step(run):
    return lambda r: r["runs"][run]["steps"]["0"]


def fallback(report):
    frameworks = report["runs"][0]["validation"]["runtime_readbacks"]["frameworks"]
    frameworks["lockstep/rollout"]["modules"]["ffn"]["implementations"] = ["lockstep", "torch"]


CHANGES = {
    "a digit of a loss": (lambda r: first_step(1)(r).update({"train/loss": 0.0030000003}), "train/loss"),
    "a digit of a norm": (lambda r: r["runs"][2]["steps"]["1"].update({"train/grad_norm": 0.20000001788139343}), "norms"),
    "a run dropped": (lambda r: r["runs"].pop(), "totals.layouts"),
    "a step dropped": (lambda r: r["runs"][1]["steps"].pop("1"), "steps"),
    "a step of all runs dropped": (lambda r: [run["steps"].pop("1") for run in r["runs"]], "steps"),
    "an iteration of all chains dropped": (lambda r: [run["chain"].pop() for run in r["runs"]], "result_digest"),
    "a step that is not finite": (lambda r: r["runs"][1]["steps"]["1"].update({"train/loss": "NaN"}), "no finite number"),
    "a step that is null": (lambda r: r["runs"][1]["steps"]["1"].update({"train/loss": None}), "no finite number"),
    "minus zero": (lambda r: first_step(1)(r).update({"train/ppo_kl": -0.0}), "train/ppo_kl"),
    "weights swapped": (lambda r: swap_hashes(r["all_parameter_hash_comparisons"], "sha256"), "weight_v000001: weights"),
    "gradients swapped": (lambda r: swap_hashes(r["gradient_hash_comparisons"], "sha256"), "step 0: gradients"),
    "moments swapped": (lambda r: swap_hashes(r["adam_state_comparisons"], "exp_avg", "sha256"), "state_v000002: exp_avg"),
    "logprobs swapped": (lambda r: swap_hashes(r["logprob_comparisons"], "quantities", "old_logprob", "sha256"), "old_logprob"),
    "tokens swapped": (lambda r: swap_hashes([r["runs"][0]["tokens"][s] for s in "01"], "sha256"), "tokens, as of"),
    "two steps swapped": (swap_steps, "train/step"),
    "two hashes of a chain swapped": (swap_in_chain, "chain of iteration 1: digest"),
    "a parent": (lambda r: r["chain_parents"]["weights"].append("weights"), "chain_parents"),
    "a failed validation": (lambda r: r["runs"][0]["validation"]["errors"].append("rank 1 is missing"), "validation.passed"),
    "a verdict": (lambda r: r.update(verdict="different"), "report: contradicts itself"),
    "a mismatch that nobody mentions": (lambda r: first_step(0)(r).update({MISMATCH: 1.0}), "bitwise_mismatch_count"),
    "a fallback": (fallback, "ffn.implementations"),
    "a count of tensors": (lambda r: r["totals"].update(tensors=r["totals"]["tensors"] + 1), "totals.tensors"),
    "a case": (lambda r: r.update(case="R/P"), "case_id"),
    "a version of torch": (lambda r: r["environment"]["packages"].update(torch="2.1"), "versions.torch"),
    "fresh": (lambda r: r.update(verification="fresh") or r["runs"][0]["executed_or_cached"].update(train="cached"), "verification"),
    "a label": (lambda r: r["runs"][2].update(label="tp4"), "label"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_doctored_copies_are_refused(report, name):
    change, place = CHANGES[name]
    found = faults(report, change)
    assert any(place in fault for fault in found), found


def test_parents_are_known_and_come_before_their_links():
    """So that a report whose parents are these has no cycle."""
    order = [quantity for _, _, quantity in places(1, ["0"])]
    assert sorted(order) == sorted(PARENTS)
    for quantity, parents in PARENTS.items():
        earlier = order[: order.index(quantity)]
        for parent in parents:
            assert parent in earlier or parent.removeprefix("previous.").removeprefix("first.") in PARENTS and "." in parent


def test_entropy_and_kl_coefficients_are_found_without_being_told(report):
    """A report holds no coefficients: losses that some short pair explains are held to it, others are said not to be checked."""

    def with_entropy(r, coefficient):
        for run in r["runs"]:
            for m in run["steps"].values():
                entropy = np.float64(np.float32(coefficient)) * m["train/entropy_loss"]
                kl = np.float64(np.float32(0.01)) * m["train/kl_loss"]
                m["train/loss"] = float(np.float32(m["train/pg_loss"] - entropy + kl))

    short = faults(report, lambda r: with_entropy(r, 0.003))
    assert short and not any("train/loss" in fault for fault in short)  # only hashes complain
    copied = copy.deepcopy(report)
    with_entropy(copied, 0.0123456)
    assert any("train/loss from its parts" in note for note in verify(copied).notes)


@pytest.fixture(scope="module")
def files(report, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    shutil.copytree(ROOT / "pipeline/verify", folder / "check it-2", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "good.json").write_text(json.dumps(report))
    (folder / "published.json").write_text(json.dumps(published_report()))
    (folder / "bad.json").write_text(json.dumps({**report, "tokens_equal": False}))
    (folder / "none.json").write_text("[]")
    return folder


@pytest.mark.parametrize("name, code", {"good": 0, "published": 0, "bad": 3, "none": 2}.items())
def test_a_copied_folder_runs_alone_on_the_standard_library(files, name, code):
    command = [sys.executable, "-I", "-S", str(files / "check it-2"), str(files / f"{name}.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == code and "Traceback" not in done.stderr
    if code == 0:
        assert done.stdout.startswith("consistent: ") and "can be forged as a whole" in done.stdout


def test_the_command_of_the_project_is_the_same(files):
    command = [sys.executable, "-m", "pipeline.verify", str(files / "good.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "its verdict: identical" in done.stdout


def test_a_reader_that_goes_away_changes_no_exit_status(files):
    line = f"{sys.executable} -m pipeline.verify {files / 'bad.json'} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 3 and "Traceback" not in done.stderr


def test_faults_are_printed_and_many_are_cut(files, capsys):
    assert main([str(files / "bad.json")]) == 3
    assert capsys.readouterr().out == "inconsistent: tokens_equal: is false, expected true\n"

"""Kernel cases side by side: what each breaks, which modules were PyTorch's own, and what that costs."""

from __future__ import annotations

import pytest
from synthetic_runs import edit_arrays, make_experiment
from test_compare import ORACLE

from pipeline.__main__ import case_sweeps
from pipeline.config import Config, Kernels, Layout
from pipeline.evidence.cases import case_matrix, other_quantities, table, write_case_matrix
from pipeline.evidence.compare import ExperimentId, RunRecord, compare
from pipeline.evidence.validation import validate
from pipeline.registry import Run


def comparison(root, case: str, seconds: float, change=None) -> dict:
    """Of one run of a case whose training took so long."""
    experiment = make_experiment(root, {"tp1cp1dp1": Layout()}, case=case)
    files = experiment.files(ORACLE)
    if change:
        edit_arrays(files.iteration(1) / "rollout/completions.safetensors", change)
    performance = {str(i): {"perf/actor_train_time": seconds} for i in (0, 1)}
    run = RunRecord(files, validate(experiment.configs[ORACLE], files), {}, performance)
    return compare([run], ExperimentId(case.replace("/", ""), experiment.digest, case))


def one_token(arrays):
    arrays["tokens"][0] += 1


def test_a_case_is_held_against_ours(tmp_path):
    ours = comparison(tmp_path / "ours", "R/R", 2.0)
    other = comparison(tmp_path / "other", "P/R", 3.0, one_token)
    matrix = case_matrix([ours, other])
    baseline, case = matrix["cases"]
    assert baseline["differs_from_baseline"] == [] and not any(baseline["modules"].values())
    assert case["costs"] == {"rollout": None, "log_probs": None, "actor_train": 1.5}
    assert case["differs_from_baseline"][0] == "tokens"
    assert case["modules"]["deepspeed/training"] == ["attention", "ffn", "logp"] and case["modules"]["lockstep/rollout"] == []
    assert other_quantities(ours["runs"][0], ours["runs"][0]) == []
    lines = table(matrix)
    assert len(lines) == 3 and lines[2].split()[0] == "P/R" and lines[2].endswith("1.50")
    write_case_matrix(tmp_path, [ours, other])
    assert "P/R" in (tmp_path / "cases.html").read_text()
    with pytest.raises(ValueError, match="no comparison of case R/R"):
        case_matrix([other])


def test_experiments_that_differ_in_kernels_only_belong_together():
    def run(case: str, **other) -> Run:
        return Run(case, f"exp-{case}", Config(kernels=Kernels(case=case), **other))

    assert case_sweeps([run("R/R"), run("P/R"), run("P/P", iterations=9)]) == [["exp-R/R", "exp-P/R"]]
    assert case_sweeps([run("P/R"), run("P/P")]) == [], "nothing to hold them against"

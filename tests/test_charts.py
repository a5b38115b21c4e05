"""Metrics and curves for DVC: what the comparison says, one row a run and step."""

from __future__ import annotations

import csv

import pytest
from synthetic_runs import make_experiment

from pipeline.digest import read_json
from pipeline.evidence.charts import write_curves, write_metrics
from pipeline.evidence.compare import ExperimentId, RunRecord, compare
from pipeline.evidence.validation import validate
from stages import validate as stage


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    return make_experiment(tmp_path_factory.mktemp("charts"))


@pytest.fixture(scope="module")
def comparison(experiment):
    runs = [RunRecord(experiment.files(k), validate(cfg, experiment.files(k)), {}, {}) for k, cfg in experiment.configs.items()]
    return compare(runs, ExperimentId("tiny", experiment.digest, "R/R"))


def test_metrics_are_the_verdict_and_the_oracles_last_step(comparison, tmp_path):
    write_metrics(tmp_path / "metrics.json", comparison)
    metrics = read_json(tmp_path / "metrics.json")
    assert (metrics["verdict"], metrics["result_digest"]) == ("identical", comparison["result_digest"])
    assert (
        metrics["layouts"] == len(comparison["runs"]) and metrics["last"]["train/loss"] == comparison["runs"][0]["steps"]["1"]["train/loss"]
    )


def test_curves_have_a_row_for_every_run_and_step_and_old_files_go(comparison, tmp_path):
    (tmp_path / "old.csv").touch()
    write_curves(tmp_path, comparison)
    with open(tmp_path / "train_loss.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [(run["label"], step, values["train/loss"]) for run in comparison["runs"] for step, values in run["steps"].items()]
    assert [(row["layout"], row["step"], float(row["value"])) for row in rows] == expected
    assert not (tmp_path / "old.csv").exists()


def test_a_runs_chain_is_written_beside_its_validation(experiment, tmp_path):
    key, cfg = next(iter(experiment.configs.items()))
    stage.run(cfg, key, experiment.paths, tmp_path / "validation.json")
    chain = read_json(tmp_path / "chain.json")
    assert chain["result_digest"] == chain["chain"][-1]["digest"] == read_json(tmp_path / "validation.json")["file_hashes"]["result_digest"]
    assert chain["chain"][1]["previous"] == chain["chain"][0]["digest"]
    assert chain["parents"]["gradients"][0] == "tokens"

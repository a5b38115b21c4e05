"""MLflow shows what the reports say, once, and is never in the way of a result."""

from __future__ import annotations

import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from synthetic_runs import LAYOUTS, edit_json, make_experiment, validate_all

from pipeline import tracking
from pipeline.config import Tracking, flatten
from pipeline.digest import read_json
from pipeline.errors import ResultsDiffer, UserError
from pipeline.evidence.compare import ExperimentId
from pipeline.paths import Paths
from stages import compare, track

KEYS = ["tiny-tp1cp1dp1", "tiny-tp2"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An experiment of two layouts with its reports, and no address from the environment."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    experiment = make_experiment(tmp_path, {name: LAYOUTS[name] for name in ("tp1cp1dp1", "tp2")})
    return SimpleNamespace(experiment=experiment, paths=experiment.paths, folder=tmp_path / "reports")


def write_reports(project) -> tracking.Reports:
    experiment = project.experiment
    validations = validate_all(experiment, project.folder / "runs")
    compare.run(experiment.configs, validations, ExperimentId("tiny", experiment.digest, "R/R"), project.paths, project.folder)
    return tracking.Reports(project.folder / "comparison.json", validations, {k: flatten(asdict(c)) for k, c in experiment.configs.items()})


def runs_of(project) -> list:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=tracking.tracking_uri(None, project.paths))
    experiment = client.get_experiment_by_name("lockstep")
    return client.search_runs([experiment.experiment_id], max_results=100)


def split(runs):
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    return parents, {run.data.tags["run_id"]: run for run in runs if run not in parents and run.data.tags["superseded"] == "false"}


def points(project, run_id) -> list:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=tracking.tracking_uri(None, project.paths))
    names = client.get_run(run_id).data.metrics
    return sorted((m.key, m.step, m.timestamp, m.value) for name in names for m in client.get_metric_history(run_id, name))


def test_a_sync_is_complete_and_a_second_one_adds_nothing(project, monkeypatch, tmp_path):
    """One test for one database: making the first takes seconds."""
    reports = write_reports(project)
    monkeypatch.chdir(tmp_path.parent)  # the default address depends on the project, not on the working directory
    assert tracking.sync(reports, Tracking(), project.paths) and not tracking.is_pending("tiny", project.paths)
    assert (tmp_path / "mlflow.db").exists()
    (parent,), children = split(runs_of(project))
    record = read_json(reports.comparison)
    assert parent.data.tags["verdict"] == "identical" and parent.data.tags["result_digest"] == record["result_digest"]
    assert parent.data.tags["experiment_digest"] == project.experiment.digest
    assert sorted(children) == KEYS and all(run.info.status == "FINISHED" for run in (parent, *children.values()))
    for key, child in children.items():
        section = next(run for run in record["runs"] if run["run_id"] == key)
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id and child.data.tags["layout"] == section["layout"]
        assert child.data.tags["weights.weight_v000003"] == section["chain"][-1]["quantities"]["weights"]
        assert child.data.params["optimizer.lr"] == "1e-06" and child.data.params["layout.tp"] == str(
            project.experiment.configs[key].layout.tp
        )
        logged = {(name, step): value for name, step, _, value in points(project, child.info.run_id)}
        assert logged["train/loss", 1] == section["steps"]["1"]["train/loss"] and logged["rollout/reward_mean", 0] == 0.5
        assert logged["perf/step_time", 0] == 3.51
    folder = tmp_path / "mlartifacts" / "lockstep"
    assert (folder / parent.info.run_id / "artifacts" / "comparison.html").exists()
    assert {p.name for p in (folder / children[KEYS[1]].info.run_id / "artifacts").iterdir()} == {f"{KEYS[1]}.json", "config.json"}

    before = {
        run.info.run_id: (points(project, run.info.run_id), run.data.tags, run.data.params, run.info.end_time) for run in runs_of(project)
    }
    assert tracking.sync(reports, Tracking(), project.paths)
    after = {
        run.info.run_id: (points(project, run.info.run_id), run.data.tags, run.data.params, run.info.end_time) for run in runs_of(project)
    }
    assert after == before

    edit_json(reports.comparison, lambda c: [run["performance"]["0"].update({"perf/step_time": 9.0}) for run in c["runs"]])
    assert tracking.sync(reports, Tracking(), project.paths)  # executed again: the same result in another time
    assert all(points(project, run.info.run_id) == before[run.info.run_id][0] for run in runs_of(project))

    _check_recovery(project, parent, children)
    _check_new_result(project, children)


def _check_recovery(project, parent, children):
    """A killed sync leaves runs RUNNING, one of them half made: the next closes both."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=tracking.tracking_uri(None, project.paths))
    client.update_run(children[KEYS[0]].info.run_id, "RUNNING")
    tags = {"mlflow.parentRunId": parent.info.run_id, "run_key": "left over", "superseded": "true"}
    left_over = client.create_run(parent.info.experiment_id, tags=tags)
    assert tracking.sync(write_reports(project), Tracking(), project.paths)
    assert client.get_run(children[KEYS[0]].info.run_id).info.status == "FINISHED"
    assert client.get_run(left_over.info.run_id).info.status == "KILLED"
    client.delete_run(left_over.info.run_id)


def _check_new_result(project, old_children):
    """Another result under the same key gets its own run; the old one keeps its points, and says that it is superseded."""
    path = project.experiment.files(KEYS[1]).iteration(1) / "train" / "metrics.json"
    edit_json(path, lambda m: m["0"].update({"train/loss": math.inf, "train/kl_loss": math.nan}))
    assert tracking.sync(write_reports(project), Tracking(), project.paths)
    (parent,), children = split(runs_of(project))
    assert parent.data.tags["verdict"] == "different" and "train/kl_loss" in parent.data.tags["first_difference"]
    assert children[KEYS[0]].info.run_id == old_children[KEYS[0]].info.run_id
    child = children[KEYS[1]]
    assert child.info.run_id != old_children[KEYS[1]].info.run_id
    assert child.data.tags["nonfinite.train/loss.step0"] == "Infinity" and child.data.tags["nonfinite.train/kl_loss.step0"] == "NaN"
    assert [step for name, step, _, _ in points(project, child.info.run_id) if name == "train/loss"] == [1]
    old = next(run for run in runs_of(project) if run.info.run_id == old_children[KEYS[1]].info.run_id)
    assert old.data.tags["superseded"] == "true"


def test_an_unreachable_server_costs_nothing_but_a_warning(project, monkeypatch, capsys):
    for name, value in (("MAX_RETRIES", "0"), ("TIMEOUT", "1")):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)
    reports = write_reports(project)
    before = reports.comparison.read_bytes()
    nowhere = Tracking(uri="http://user:secret@127.0.0.1:9")
    assert tracking.sync(reports, nowhere, project.paths) is False
    warning = capsys.readouterr().err
    assert warning.startswith("warning: tracking.uri=http://127.0.0.1:9: not reached") and warning.count("\n") == 1
    assert tracking.is_pending("tiny", project.paths) and reports.comparison.read_bytes() == before
    with pytest.raises(UserError, match="not reached"):
        tracking.sync(reports, Tracking(uri=nowhere.uri, strict=True), project.paths)
    assert "secret" not in (project.paths.logs("tiny") / "tracking.json").read_text() + warning


def test_the_stage_fails_when_the_runs_differ_but_only_after_all_is_written(project):
    off = Tracking(enabled=False)
    reports = write_reports(project)
    arguments = (reports.validations, reports.params, off, project.paths)
    assert track.run(reports.comparison, *arguments).startswith("identical: 2 layouts (tp1cp1dp1, tp2), result digest ")
    edit_json(project.experiment.files(KEYS[1]).iteration(1) / "train" / "metrics.json", lambda m: m["0"].update({"train/loss": 9.0}))
    write_reports(project)
    with pytest.raises(ResultsDiffer, match=r"different: iteration 1, step 0, metrics: train/loss is .* in tiny-tp1cp1dp1"):
        track.run(reports.comparison, *arguments)


@pytest.mark.parametrize(
    ("configured", "environment", "expected"),
    [("http://a", "http://b", "http://a"), (None, "http://b", "http://b"), (None, None, "sqlite:///{root}/mlflow.db")],
)
def test_where_the_service_is_looked_for(tmp_path, monkeypatch, configured, environment, expected):
    if environment:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", environment)
    else:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking.tracking_uri(configured, Paths(tmp_path)) == expected.format(root=tmp_path)


def test_names_and_values_fit_mlflow():
    assert tracking._name("optimizer|lr@x=1%(2),3") == "optimizer_lr_x_1__2__3"
    assert tracking._name("train/lr-pg_0") == "train/lr-pg_0"
    assert (tracking._param(5e-07), tracking._param(0.00000050), tracking._param(None), tracking._param([0.9, 0.95])) == (
        "5e-07",
        "5e-07",
        "None",
        "[0.9, 0.95]",
    )
    sizes = [len(part) for part in tracking._chunks(range(2500), tracking.MAX_METRICS)]
    assert sizes == [1000, 1000, 500]

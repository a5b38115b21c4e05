"""MLflow: one parent run per experiment, one child per layout, written from the reports after the fact.

A sync says the same however often it runs: runs are found by tags, a metric's timestamp follows from its step, and a run whose result or
configuration is another gets a new MLflow run instead of second values in the old one. The service is never needed for a result.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.digest import read_json, sha256_json, write_json
from pipeline.errors import UserError
from pipeline.evidence.compare import summary_line
from pipeline.paths import Paths

MAX_METRICS, MAX_OTHERS = 1000, 100  # of one log_batch, by MLflow's REST interface
MAX_PARAM, MAX_TAG = 6000, 5000  # characters; MLflow cuts longer parameters with a mere warning
STEP_MILLISECONDS = 1000  # timestamps are run start + step x this: the same in every sync
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",  # what was acknowledged must survive a kill
}


@dataclass(frozen=True)
class Reports:
    """What a sync reads."""

    comparison: Path  # comparison.json; comparison.html beside it is logged too
    validations: Mapping[str, Path]  # by run key
    params: Mapping[str, Mapping[str, Any]]  # flattened configuration by run key


def tracking_uri(uri: str | None, paths: Paths) -> str:
    """The configured address, else MLFLOW_TRACKING_URI, else a database in the project folder, wherever the command runs."""
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{paths.root.resolve() / 'mlflow.db'}"


def sync(reports: Reports, tracking: Any, paths: Paths) -> bool:
    """Bring MLflow up to date with the reports; False when that has to wait (the pending mark lies in logs/).

    Raises UserError instead of returning False when `tracking.strict` is set. The reports stay as they are in any case.
    """
    comparison = read_json(reports.comparison)
    uri = tracking_uri(tracking.uri, paths)
    mark = paths.logs(comparison["experiment"]) / "tracking.json"
    write_json(mark, {"status": "pending", "uri": _without_password(uri)})
    try:
        with _settings():
            run_id = _Sync(uri, tracking.experiment, paths).write(comparison, reports)
    except Exception as error:  # a tracking service, its client and its storage fail in many ways; none of them may cost a result
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        reason = _without_password(f"{type(error).__name__}: {first_line}")
        write_json(mark, {"status": "pending", "uri": _without_password(uri), "error": reason[:500]})
        remedy = f"the results are complete; `dvc repro --force --single-item track@{comparison['experiment']}` tries again"
        text = f"tracking.uri={_without_password(uri)}: not reached ({reason[:200]}); {remedy}"
        if tracking.strict:
            raise UserError(text) from error
        print(f"warning: {text}", file=sys.stderr)
        return False
    write_json(mark, {"status": "synced", "uri": _without_password(uri), "mlflow_run": run_id})
    return True


def is_pending(experiment: str, paths: Paths) -> bool:
    """Has the last sync of an experiment failed, or was it killed?"""
    try:
        return read_json(paths.logs(experiment) / "tracking.json")["status"] == "pending"
    except (OSError, ValueError, KeyError):
        return False


def _without_password(uri: str) -> str:
    return re.sub(r"//[^/@]*@", "//", uri)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """MLflow's switches for the time of the sync; what the user has set stays."""
    added = {name: value for name, value in SETTINGS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


class _Sync:
    def __init__(self, uri: str, experiment: str, paths: Paths):
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):  # a line for every table of a new database
            logging.getLogger(name).setLevel(logging.ERROR)
        self.client = MlflowClient(tracking_uri=uri)
        self.paths = paths
        found = self.client.get_experiment_by_name(experiment)
        if found is None:
            # a database of ours keeps its artifacts in the project too; MLflow would put them below the working directory
            local = (paths.root.resolve() / "mlartifacts" / experiment).as_uri() if uri.startswith("sqlite:") else None
            self.experiment = self.client.create_experiment(experiment, artifact_location=local)
        else:
            if found.lifecycle_stage == "deleted":
                self.client.restore_experiment(found.experiment_id)
            self.experiment = found.experiment_id

    def write(self, comparison: dict[str, Any], reports: Reports) -> str:
        parent_key = f"{comparison['experiment']}-{comparison['experiment_digest'][:16]}"
        parent = self._find_or_create(parent_key, comparison["experiment"], {}, {})
        git = _git_sha(self.paths.root)
        common = {
            "case": comparison["case"],
            "experiment_digest": comparison["experiment_digest"],
            "git_sha": git,
            "verdict": comparison["verdict"],
        }
        used = {parent.info.run_id}
        for run in comparison["runs"]:
            used.add(self._child(run, parent, f"{parent_key}.{run['run_id']}", common, reports))
        self._log(parent, tags={**common, **_parent_tags(comparison)})
        for path in (reports.comparison, reports.comparison.with_suffix(".html")):
            if path.exists():
                self.client.log_artifact(parent.info.run_id, str(path))
        self._close_left_over(parent.info.run_id, used)
        self._finish(parent.info.run_id)
        return parent.info.run_id

    def _child(self, run: dict[str, Any], parent: Any, key: str, common: dict[str, Any], reports: Reports) -> str:
        params = {_name(name): _param(value) for name, value in reports.params.get(run["run_id"], {}).items()}
        identity = {"result_digest": run["result_digest"], "config_digest": sha256_json(params)}
        child = self._find_or_create(key, run["layout"], identity, {"mlflow.parentRunId": parent.info.run_id})
        metrics, odd = _metrics(run, child.info.start_time)
        timed = self._timed(child)
        metrics = [point for point in metrics if (point.key, point.step) not in timed]
        self._log(child, {name: value[:MAX_PARAM] for name, value in params.items()}, {**common, **_run_tags(run), **odd}, metrics)
        self.client.log_dict(child.info.run_id, params, "config.json")
        if (path := reports.validations.get(run["run_id"])) is not None:
            self.client.log_artifact(child.info.run_id, str(path))
        self._finish(child.info.run_id)
        return child.info.run_id

    def _timed(self, run: Any) -> set[tuple[str, int]]:
        """(name, step) of the timings that a run has. They stay: those of another execution of the same result would be second points."""
        names = [name for name in run.data.metrics if name.startswith("perf/")]
        return {(name, point.step) for name in names for point in self.client.get_metric_history(run.info.run_id, name)}

    def _find_or_create(self, key: str, name: str, identity: dict[str, str], tags: dict[str, str]) -> Any:
        """The run with this key and identity. Runs with the key and another identity are older results: they stay, and say so."""
        same_key = self.client.search_runs([self.experiment], f"tags.run_key = '{key}'")
        found = [run for run in same_key if all(run.data.tags.get(name) == value for name, value in identity.items())]
        for run in same_key:
            superseded = str(run not in found[:1]).lower()
            if run.data.tags.get("superseded") != superseded:
                self.client.set_tag(run.info.run_id, "superseded", superseded)
        if found:
            return found[0]
        tags = {"run_key": key, "superseded": "false", **identity, **tags}
        return self.client.create_run(self.experiment, start_time=int(time.time() * 1000), tags=tags, run_name=name)

    def _log(
        self, run: Any, params: Mapping[str, str] | None = None, tags: Mapping[str, Any] | None = None, metrics: Sequence[Any] = ()
    ) -> None:
        from mlflow.entities import Param, RunTag

        run_id = run.info.run_id
        new = [Param(name, value) for name, value in (params or {}).items() if run.data.params.get(name) != value]
        texts = {_name(name): str(value)[:MAX_TAG] for name, value in (tags or {}).items() if value is not None}
        changed = [RunTag(name, value) for name, value in texts.items() if run.data.tags.get(name) != value]
        for part in _chunks(new, MAX_OTHERS):
            self.client.log_batch(run_id, params=part)
        for part in _chunks(changed, MAX_OTHERS):
            self.client.log_batch(run_id, tags=part)
        for part in _chunks(metrics, MAX_METRICS):
            self.client.log_batch(run_id, metrics=part)

    def _finish(self, run_id: str) -> None:
        if self.client.get_run(run_id).info.status != "FINISHED":
            self.client.set_terminated(run_id, "FINISHED")

    def _close_left_over(self, parent_id: str, used: set[str]) -> None:
        """A sync that was killed leaves its runs RUNNING for ever."""
        for run in self.client.search_runs(
            [self.experiment], f"tags.`mlflow.parentRunId` = '{parent_id}' and attributes.status = 'RUNNING'"
        ):
            if run.info.run_id not in used:
                self.client.set_terminated(run.info.run_id, "KILLED")


def _metrics(run: dict[str, Any], start: int) -> tuple[list[Any], dict[str, str]]:
    """Metric points by step, and tags for values that MLflow would falsify (it stores inf as 1.8e308)."""
    from mlflow.entities import Metric

    points, odd = [], {}
    for section in ("steps", "performance"):
        for step, values in sorted(run[section].items(), key=lambda item: int(item[0])):
            for name, value in sorted(values.items()):
                if name == "reason" or value is None:
                    continue
                if math.isfinite(number := float(value)):
                    points.append(Metric(_name(name), number, start + int(step) * STEP_MILLISECONDS, int(step)))
                else:
                    odd[f"nonfinite.{name}.step{step}"] = str(value)
    return points, odd


def _run_tags(run: dict[str, Any]) -> dict[str, Any]:
    validation = run["validation"]
    tags = {"layout": run["layout"], "run_id": run["run_id"], "validation_passed": str(validation["passed"]).lower()}
    if validation["errors"]:
        tags["validation_error"] = validation["errors"][0]
    for element in run["chain"]:
        tags[f"chain.i{element['iteration']:04d}"] = element["digest"]
        tags[f"weights.weight_v{element['iteration'] + 1:06d}"] = element["quantities"].get("weights")
        if element["quantities"].get("tokens"):
            tags[f"tokens.i{element['iteration']:04d}"] = element["quantities"]["tokens"]
    executed = run.get("executed_or_cached") or {}
    return tags | {f"ran.{stage}": how for stage, how in executed.items()}


def _parent_tags(comparison: dict[str, Any]) -> dict[str, Any]:
    difference = comparison["first_difference"]
    return {
        "expected_digest": comparison["expected_digest"],
        "first_difference": difference["text"] if difference else None,
        "layouts": " ".join(run["layout"] for run in comparison["runs"]),
        "mlflow.note.content": summary_line(comparison),
        "oracle": comparison["oracle"],
        "result_digest": comparison["result_digest"] or "none",
    }


def _param(value: Any) -> str:
    """One text per value: floats by repr, so that 5e-07 and 5.0e-07 are one."""
    return repr(value) if isinstance(value, float) else str(value)


def _name(name: str) -> str:
    """MLflow refuses | @ , = % ( ) and more in names."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    items = list(items)
    for i in range(0, len(items), size):
        yield items[i : i + size]


def _git_sha(root: Path) -> str | None:
    """Commit of the project, with "+changes" when tracked files differ from it."""
    try:
        command = ["git", "-C", str(root)]
        sha = subprocess.run([*command, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = subprocess.run(
            [*command, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return sha + ("+changes" if status.strip() else "")

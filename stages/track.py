"""Track: show the comparison in MLflow, print the verdict, and fail when the runs differ. Nothing is measured here, only read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config import Tracking
from pipeline.digest import read_json
from pipeline.errors import ResultsDiffer
from pipeline.evidence.compare import summary_line
from pipeline.paths import Paths
from pipeline.tracking import Reports, sync


def run(
    comparison: Path, validations: Mapping[str, Path], params: Mapping[str, Mapping[str, Any]], tracking: Tracking, paths: Paths
) -> str:
    """Returns the line to print. validations and params (the flattened configuration) are by run key.

    Raises ResultsDiffer after the sync, so that a plain `dvc repro` fails too when the verdict is "different".
    """
    if tracking.enabled:
        sync(Reports(comparison, validations, params), tracking, paths)
    record = read_json(comparison)
    line = summary_line(record)
    if record["verdict"] == "different":
        raise ResultsDiffer(f"{record['experiment']}: {line}; see {comparison.with_suffix('.html')}")
    return line


def rank_main(args: dict[str, Any]) -> dict[str, Any]:
    from dataclasses import asdict

    from pipeline import registry
    from pipeline.config import flatten

    known, key = registry.load(), args["key"]
    runs = known.experiment(key).runs
    configs = {run_key: known.run(run_key) for run_key in runs}
    validations = {run_key: known.paths.validation(key, run_key) for run_key in runs}
    params = {run_key: flatten(asdict(cfg)) for run_key, cfg in configs.items()}
    line = run(known.paths.comparison(key), validations, params, next(iter(configs.values())).tracking, known.paths)
    print(f"{key}: {line}", flush=True)
    return {}


if __name__ == "__main__":
    from stages import entry

    entry.run_alone("track")

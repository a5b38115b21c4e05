"""Compare all runs of one experiment, and lay the comparison out for people."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.digest import read_json, write_bytes
from pipeline.evidence.chain import RunFiles
from pipeline.evidence.charts import write_curves, write_metrics
from pipeline.evidence.compare import ExperimentId, RunRecord, compare, write_comparison
from pipeline.evidence.performance import executed_or_cached, read_performance, verification
from pipeline.evidence.recorded import recorded_object
from pipeline.evidence.report import render
from pipeline.evidence.run_summary import read_samples
from pipeline.layout import stage_mesh
from pipeline.paths import Paths


def run(
    runs: Mapping[str, Any],
    validations: Mapping[str, Path],
    experiment: ExperimentId,
    paths: Paths,
    output: Path,
    executions: Mapping[str, dict[str, Any]] | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Writes comparison.json and comparison.html into folder `output` and returns the record, whatever its verdict.

    runs: {run key: its whole configuration}; validations: {run key: its validation.json}; executions: {run key: the execution half of
    its configuration as plain values, for the report}; command: name of the `verify=fresh` command that runs this, if one does.
    """
    records = [_record(key, cfg, validations[key], paths, (executions or {}).get(key, {})) for key, cfg in runs.items()]
    fresh = verification([record.files for record in records], command)
    record = compare(records, experiment, recorded_object(paths.environment), fresh)
    write_comparison(output / "comparison.json", record)
    write_bytes(output / "comparison.html", render(record).encode())
    write_metrics(output / "metrics.json", record)
    write_curves(output / "curves", record)
    return record


def _record(key: str, cfg: Any, validation: Path, paths: Paths, execution: dict[str, Any]) -> RunRecord:
    files = RunFiles.of(cfg, key, paths)
    lengths = {iteration: arrays["lengths"].tolist() for iteration, arrays in read_samples(files).items()}
    performance = read_performance(files, lengths, stage_mesh(cfg.layout, "train").world_size)
    return RunRecord(files, read_json(validation), execution, performance, executed_or_cached(files))


def rank_main(args: dict[str, Any]) -> dict[str, Any]:
    from pipeline import registry
    from pipeline.config import execution_half

    known, key = registry.load(), args["key"]
    group = known.experiment(key)
    configs = {run_key: known.run(run_key) for run_key in group.runs}
    validations = {run_key: known.paths.validation(key, run_key) for run_key in group.runs}
    experiment = ExperimentId(key, group.digest, next(iter(configs.values())).kernels.case_id)
    executions = {run_key: execution_half(cfg) for run_key, cfg in configs.items()}
    record = run(configs, validations, experiment, known.paths, known.paths.report(key), executions, os.environ.get("LOCKSTEP_FRESH"))
    return {"verdict": record["verdict"]}


if __name__ == "__main__":
    from stages import entry

    entry.run_alone("compare")

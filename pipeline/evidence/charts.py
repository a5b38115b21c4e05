"""What `dvc metrics show` and `dvc plots show` show of a comparison."""

from __future__ import annotations

import csv
import io
import shutil
from pathlib import Path
from typing import Any

from pipeline.digest import write_bytes, write_json
from pipeline.evidence.curves import SHOWN


def write_metrics(path: Path, comparison: dict[str, Any]) -> None:
    """The verdict, what it rests on, and the oracle's metrics after its last step."""
    oracle = next(run for run in comparison["runs"] if run["run_id"] == comparison["oracle"])
    last = max(oracle["steps"], key=int, default=None)
    record: dict[str, Any] = {name: comparison[name] for name in ("verdict", "result_digest", "verification")}
    record |= comparison["totals"] | {"last": {name: oracle["steps"][last].get(name) for name in SHOWN} if last else {}}
    write_json(path, record)


def write_curves(folder: Path, comparison: dict[str, Any]) -> None:
    """A file a metric, a row a run and step: step, value, layout."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in SHOWN:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("step", "value", "layout"))
        rows = [
            (int(step), repr(float(values[name])), run["label"])
            for run in comparison["runs"]
            for step, values in sorted(run["steps"].items(), key=lambda item: int(item[0]))
            if name in values
        ]
        writer.writerows(rows)
        if rows:
            write_bytes(folder / f"{name.replace('/', '_')}.csv", text.getvalue().encode())

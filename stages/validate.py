"""Validate one run: everything that its stages left behind, against its configuration and against itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.evidence.chain import RunFiles
from pipeline.evidence.validation import validate, write_validation
from pipeline.paths import Paths


def run(cfg: Any, key: str, paths: Paths, output: Path) -> dict[str, Any]:
    """Writes the validation record of run `key` to `output` and returns it. A failed validation is a result, not an exception."""
    record = validate(cfg, RunFiles.of(cfg, key, paths))
    write_validation(output, record)
    return record


def rank_main(args: dict[str, Any]) -> dict[str, Any]:
    from pipeline import registry

    known, key = registry.load(), args["key"]
    record = run(known.run(key), key, known.paths, known.paths.validation(known.experiment_of(key), key))
    return {"passed": record["passed"]}


if __name__ == "__main__":
    from stages import entry

    entry.run_alone("validate")

"""Validate one run: everything that its stages left behind, against its configuration and against itself; and its hash chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.digest import write_json
from pipeline.evidence.chain import PARENTS, RunFiles, read_evidence
from pipeline.evidence.validation import validate, write_validation
from pipeline.paths import Paths


def run(cfg: Any, key: str, paths: Paths, output: Path) -> dict[str, Any]:
    """Writes the validation record of run `key` to `output`, its chain beside it, and returns the record. A failed validation is a result,
    not an exception."""
    evidence = read_evidence(RunFiles.of(cfg, key, paths))
    record = validate(cfg, evidence.files, evidence)
    write_validation(output, record)
    parents = {name: list(of) for name, of in PARENTS.items()}
    write_json(output.with_name("chain.json"), {"chain": evidence.chain, "parents": parents, "result_digest": evidence.result_digest})
    return record


def rank_main(args: dict[str, Any]) -> dict[str, Any]:
    from pipeline import registry

    known, key = registry.load(), args["key"]
    record = run(known.run(key), key, known.paths, known.paths.validation(known.experiment_of(key), key))
    return {"passed": record["passed"]}


if __name__ == "__main__":
    from stages import entry

    entry.run_alone("validate")

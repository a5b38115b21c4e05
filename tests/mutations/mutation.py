"""A mutation of run folders, and the small edits that mutations are made of."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.digest import hash_safetensors, sha256_json, sha256_tensor, tensors_digest
from pipeline.records import tokens_sha256
from tests.mutations.runs import Runs
from tests.mutations.verdicts import Expected
from tests.synthetic_runs import edit_json


@dataclass(frozen=True)
class Mutation:
    name: str
    row: str  # of the table: many alike share one
    change: Callable[[Runs], Expected]  # breaks files and returns what must be said of it
    validated: str = "other"  # runs that are validated after the change: other | oracle | all | none
    files: tuple[Path, ...] = ()  # the only ones that are changed; empty: any may be


def named(name: str, change: Callable[[Runs], Expected], validated: str = "other") -> Mutation:
    """One with a row of its own."""
    return Mutation(name, name, change, validated)


def place(iteration: int, quantity: str, **fields: Any) -> dict[str, Any]:
    return {"iteration": iteration, "quantity": quantity, **fields}


def folder(runs: Runs, name: str = "") -> Path:
    """A folder or file of the run that is broken."""
    return runs.paths.run(runs.other) / name


def replace_folder(source: Path, target: Path) -> None:
    shutil.rmtree(target)
    shutil.copytree(source, target)


# --- records made to fit ------------------------------------------------------------------------------------------------------------
def refit(path: Path) -> None:
    """The record of hashes beside a file of tensors, as the stage would have written it for what is there now."""
    stored = hash_safetensors(path)
    match path.name:
        case "completions.safetensors":
            record, prefix = "summary.json", ""
        case "logprobs.safetensors":
            record, prefix = "hashes.json", ""
        case _:
            record, prefix = "tensors.json", f"{path.stem}/" if path.parent.parent.name == "state" else ""

    def change(content: dict[str, Any]) -> None:
        if record == "tensors.json":
            content["sha256"] |= {f"{prefix}{name}": sha for name, sha in stored.items()}
            content["digest"] = tensors_digest(content["sha256"])
        else:
            content["sha256"] = stored
            redigest(content)

    edit_json(path.parent / record, change)


def redigest(content: dict[str, Any]) -> None:
    content["digest"] = sha256_json({key: value for key, value in content.items() if key != "digest"})


def refit_rollout(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """summary.json for arrays that are about to be stored."""

    def change(summary: dict[str, Any]) -> None:
        hashes = {name: sha256_tensor(np.ascontiguousarray(array)) for name, array in arrays.items()}
        summary.update(sha256=hashes, tokens_sha256=tokens_sha256(arrays), token_count=len(arrays["tokens"]))
        redigest(summary)

    edit_json(path.parent / "summary.json", change)

"""The sweep once more, with every run changed alike: what a damaged object of DVC's cache does that equal layouts share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.mutations.mutation import Mutation
from tests.mutations.runs import Runs
from tests.mutations.sweep import json_mutations, tensor_mutations
from tests.mutations.verdicts import Expected


def shared_sweep(runs: Runs) -> Iterator[Mutation]:
    """No comparison can tell, the records that the stages wrote beside the values must.

    Sidecars and readbacks are each layout's own.
    """
    for mutation in (*tensor_mutations(runs, runs.other), *json_mutations(runs, runs.other, every_rank=False)):
        kind, _, what = mutation.row.partition(": ")
        if what.startswith(("sidecar", "readback", "checkpoint")):
            continue
        place = mutation.files[0].relative_to(runs.paths.run(runs.other))
        tensor = mutation.name.removeprefix(f"{place.as_posix()} ").partition("[")[0] if place.suffix == ".safetensors" else ""
        files = tuple(runs.paths.run(key) / place for key in runs.configs)
        change = in_all(mutation, files, Expected(reason=record_of(place, tensor)))
        yield Mutation(f"{mutation.name} in every run", f"{kind} in every run: {what}", change, "all", files)


def in_all(mutation: Mutation, files: tuple[Path, ...], expected: Expected) -> Callable[[Runs], Expected]:
    def change(runs: Runs) -> Expected:
        mutation.change(runs)
        for file in set(files) - {mutation.files[0]}:
            shutil.copy(mutation.files[0], file)
        return expected

    return change


def record_of(path: Path, tensor: str) -> str:
    """What the validation says of changed bytes: the record that they do not fit."""
    unequal = "sha256 of 1 tensors is not the hash of the stored bytes (the first: "
    match path.name:
        case "completions.safetensors":
            return f"{path.with_name('summary.json')}: {unequal}{tensor})"
        case "logprobs.safetensors":
            return f"{path.with_name('hashes.json')}: {unequal}{tensor})"
        case "exp_avg.safetensors" | "exp_avg_sq.safetensors":
            return f"{path.with_name('tensors.json')}: {unequal}{path.stem}/{tensor})"
        case "model.safetensors" | "ref.safetensors":
            return f"{path.with_name('tensors.json')}: {unequal}{tensor})"
        case "metrics.json":
            return f"{path.with_name('hashes.json')}: metrics is not the sha256 of metrics.json"
        case "hashes.json" | "summary.json" | "tensors.json":
            return f"{path}: digest is not that of its "
        case "step.json":
            return f"{path} is "
        case "config.json" | "generation_config.json":
            return f"{path}: is not the checkpoint's {path.name}"
        case _:
            raise ValueError(f"{path}: a file that no mutation covers")

"""The sweep once more, with every run changed alike: what a damaged object of DVC's cache does that equal layouts share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
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
        path = mutation.files[0]
        if "sidecar" in mutation.group or "readback" in mutation.group or "checkpoint" in mutation.group:
            continue
        place = path.relative_to(runs.paths.run(runs.other))
        files = tuple(runs.paths.run(key) / place for key in runs.configs)
        expected = Expected(reason=record_of(place.as_posix()))
        group = mutation.group.partition(": ")

        def change(runs: Runs, change=mutation.change, files=files, expected=expected) -> Expected:
            change(runs)
            for file in files:  # all runs hold the same bytes
                if file.read_bytes() != files[-1].read_bytes():
                    shutil.copy(files[-1], file)
            return expected

        yield Mutation(f"{mutation.name} in every run", f"{group[0]} in every run: {group[2]}", change, "all", files)


def record_of(place: str) -> str:
    """What the validation says of changed bytes: the record that they do not fit."""
    path = Path(place)
    match path.name:
        case "completions.safetensors":
            return f"{path.with_name('summary.json')}: sha256 of 1 tensors is not the hash of the stored bytes"
        case "logprobs.safetensors":
            return f"{path.with_name('hashes.json')}: sha256 of 1 tensors is not the hash of the stored bytes"
        case "metrics.json":
            return f"{path.with_name('hashes.json')}: metrics is not the sha256 of metrics.json"
        case "hashes.json" | "summary.json" | "tensors.json":
            return f"{place}: digest is not that of its "
        case "step.json":
            return f"{place} is "
        case "config.json" | "generation_config.json":
            return f"{place}: is not the checkpoint's {path.name}"
        case _:
            return f"{path.with_name('tensors.json')}: sha256 of 1 tensors is not the hash of the stored bytes"

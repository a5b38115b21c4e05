"""Did every process run the kernels that the case names, as often as the configuration implies?

A readback is what a rank reports after its work: kernels and calls per module. What it should say follows from the layout alone:

    attention calls = ffn calls = layers x forwards        logp calls = forwards        (per rank and iteration)

    training   forwards = 2 x U x m    old logprobs once, then once with gradients; backwards = U x m
    reference  forwards = m'
    rollout    forwards = steps of continuous batching over the rank's own samples, replayed from the response lengths

with U optimizer steps, m micro-batches of S / U samples and m' micro-batches of S samples (`pipeline.layout.micro_batches`: padded, so
that every rank has as many).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import Kernels
from pipeline.digest import read_json
from pipeline.layout import MeshShape, micro_batches, owned_samples, stage_mesh

MODULES = ("attention", "ffn", "logp")
STAGES = {"train": "training", "ref_logprob": "reference", "rollout": "rollout"}  # stage -> side in the readback
BUILDS = ("cpu.avx512", "cpu.avx2", "cpu.scalar")
BACKEND_IDS = {  # what each module's kernels report under; stages/model.py writes them
    ("attention", "lockstep"): "lockstep.attention.tree.v1",
    ("ffn", "lockstep"): "lockstep.ffn.tree.v1",
    ("logp", "lockstep"): "lockstep.linear_logp.tree.v1",
    ("attention", "torch"): "torch.nn.functional.scaled_dot_product_attention",
    ("ffn", "torch"): "torch.nn.functional.linear",
    ("logp", "torch"): "torch.log_softmax",
}
FRAMEWORKS = {"train": "deepspeed/training", "ref_logprob": "lockstep/reference", "rollout": "lockstep/rollout"}


def expected_implementation(case: str, stage: str) -> str:
    """A module's case "R/P" = our kernels in training (and for the reference), PyTorch's own in the rollout."""
    training, rollout = case.split("/")
    return {"R": "lockstep", "P": "torch"}[rollout if stage == "rollout" else training]


def count_micro_batches(layout: Any, num_samples: int) -> int:
    """Forwards that one pass over `num_samples` samples takes, the same on every rank."""
    size = layout.samples_per_forward
    return len(micro_batches(owned_samples(num_samples, layout.dp, 0), size, num_samples, layout.dp))


def decode_steps(response_lengths: Sequence[int], batch_size: int) -> int:
    """Forwards of continuous batching: a free slot takes the next sample at once, and a sample holds its slot one step per token."""
    slots = [0] * min(batch_size, len(response_lengths))
    for length in response_lengths:
        heapq.heapreplace(slots, slots[0] + int(length))
    return max(slots, default=0)


def expected_counts(layout: Any, stage: str, response_lengths: Sequence[int], num_updates: int) -> list[tuple[int, int]]:
    """(forwards, backwards) of each rank in one iteration; see the formulas above."""
    mesh, num_samples = stage_mesh(layout, stage), len(response_lengths)
    if stage == "train":
        calls = num_updates * count_micro_batches(layout, num_samples // num_updates)
        return [(2 * calls, calls)] * mesh.world_size
    if stage == "ref_logprob":
        return [(count_micro_batches(layout, num_samples), 0)] * mesh.world_size
    counts = []
    for rank in range(mesh.world_size):
        own = owned_samples(num_samples, mesh.dp, mesh.coordinates(rank)[2])
        counts.append((decode_steps([response_lengths[i] for i in own], layout.rollout.batch_size), 0))
    return counts


@dataclass
class FrameworkReadbacks:
    """What all ranks of one stage reported, over the iterations."""

    stage: str
    kernels: Kernels
    num_layers: int
    kernel_build: str = "auto"  # as asked for
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    builds: set[str] = field(default_factory=set)
    versions: dict[str, set[str]] = field(default_factory=dict)
    processes: set[int] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    readback_count: int = 0

    def __post_init__(self) -> None:
        for module in MODULES:
            self.modules[module] = {"backend_ids": set(), "implementations": set(), "call_count": 0, "processes": set()}

    def read(self, folder: Path, place: str, layout: Any, counts: Sequence[tuple[int, int]]) -> None:
        """Take in one iteration's folder: exactly one file per rank, each checked."""
        mesh = stage_mesh(layout, self.stage)
        names = {f"rank{rank:05d}.json" for rank in range(mesh.world_size)}
        found = {path.name for path in folder.glob("*.json")} if folder.is_dir() else set()
        self.errors += [f"{place}/{name}: readback is missing" for name in sorted(names - found)]
        self.errors += [f"{place}/{name}: readback of a rank that the layout doesn't have" for name in sorted(found - names)]
        for rank in range(mesh.world_size):
            name = f"rank{rank:05d}.json"
            if name in found:
                try:
                    self._check(f"{place}/{name}", read_json(folder / name), rank, mesh, counts[rank])
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    self.errors.append(f"{place}/{name}: not a readback ({type(error).__name__}: {error})")

    def _check(self, place: str, readback: dict[str, Any], rank: int, mesh: MeshShape, counts: tuple[int, int]) -> None:
        self.readback_count += 1
        self.processes.add(rank)
        self.builds.add(readback["kernel_build"])
        allowed = BUILDS if self.kernel_build == "auto" else (f"cpu.{self.kernel_build}",)
        if readback["kernel_build"] not in allowed:
            self.errors.append(f"{place}: kernel_build is {readback['kernel_build']}, expected {' or '.join(allowed)}")
        if "torch" not in readback["versions"]:
            self.errors.append(f"{place}: versions has no torch")
        for package, version in readback["versions"].items():
            self.versions.setdefault(package, set()).add(version)
        forwards, backwards = counts
        for key, value in (
            ("rank", rank),
            ("side", STAGES[self.stage]),
            ("world_size", mesh.world_size),
            ("mesh", list(mesh.coordinates(rank))),
        ):
            self._expect(place, key, readback[key], value)
        self._expect(place, "counts.forwards", readback["counts"]["forwards"], forwards)
        self._expect(place, "counts.backwards", readback["counts"]["backwards"], backwards)
        for module in MODULES:
            if module not in readback["modules"]:
                self.errors.append(f"{place}: module {module} is missing")
                continue
            report, total = readback["modules"][module], self.modules[module]
            calls = forwards if module == "logp" else forwards * self.num_layers
            self._expect(place, f"{module}.call_count", report["call_count"], calls)
            wanted = expected_implementation(self.kernels.of(module), self.stage)
            if report["implementation"] != wanted:
                self.errors.append(f"{place}: {module} ran {report['implementation']}, case {self.kernels.of(module)} asks for {wanted}")
            self._expect(place, f"{module}.backend_id", report["backend_id"], BACKEND_IDS[module, wanted])
            total["backend_ids"].add(report["backend_id"])
            total["implementations"].add(report["implementation"])
            total["call_count"] += report["call_count"]
            total["processes"].add(rank)

    def _expect(self, place: str, key: str, value: Any, expected: Any) -> None:
        if value != expected:
            self.errors.append(f"{place}: {key} is {value}, expected {expected}")

    def finish(self) -> dict[str, Any]:
        """The framework's section of the validation; several backends for one module, or several builds, are errors."""
        name = FRAMEWORKS[self.stage]
        for module, total in self.modules.items():
            if len(total["backend_ids"]) > 1:
                self.errors.append(f"{name}: ranks ran several {module} backends: {', '.join(sorted(total['backend_ids']))}")
        for package, versions in sorted(self.versions.items()):
            if len(versions) > 1:
                self.errors.append(f"{name}: ranks ran several versions of {package}: {', '.join(sorted(versions))}")
        if len(self.builds) > 1:
            self.errors.append(f"{name}: ranks ran several kernel builds: {', '.join(sorted(self.builds))}")
        return {
            "kernel_builds": sorted(self.builds),
            "modules": {
                module: {
                    "backend_ids": sorted(total["backend_ids"]),
                    "call_count": total["call_count"],
                    "case_id": self.kernels.case_id,
                    "expected_implementation": expected_implementation(self.kernels.of(module), self.stage),
                    "implementations": sorted(total["implementations"]),
                    "installed_processes": len(total["processes"]),
                }
                for module, total in self.modules.items()
            },
            "readback_count": self.readback_count,
            "versions": {package: sorted(versions) for package, versions in sorted(self.versions.items())},
        }


def read_frameworks(
    folder_of: Any,
    layout: Any,
    kernels: Kernels,
    num_layers: int,
    lengths: dict[int, Sequence[int]],
    num_updates: int,
    kernel_build: str = "auto",
) -> dict[str, Any]:
    """`runtime_readbacks` of the validation. folder_of(iteration) -> run folder; lengths: response lengths by iteration."""
    frameworks, errors = {}, []
    for stage, name in FRAMEWORKS.items():
        readbacks = FrameworkReadbacks(stage, kernels, num_layers, kernel_build)
        for iteration, own in lengths.items():
            counts = expected_counts(layout, stage, own, num_updates)
            folder = folder_of(iteration) / "readbacks" / stage
            readbacks.read(folder, f"i{iteration:04d}/readbacks/{stage}", layout, counts)
        frameworks[name] = readbacks.finish()
        errors += readbacks.errors
    return {"errors": errors, "frameworks": frameworks, "passed": not errors}

"""New weights from the trainer to the rollout engine of the same processes, in memory. Bytes travel, so no value changes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from stages.engine import LockstepEngine
from stages.mesh import Mesh
from stages.trainer import Trainer

BUCKET_NUMEL = 1 << 24  # 64 MiB of fp32


def hand_over(trainer: Trainer, engine: LockstepEngine | None, rollout: Mesh, version: str) -> None:
    """Collective over the trainer's ranks, of which the first have an engine. rollout: the engine's mesh."""
    if trainer.mesh.shape.tp == rollout.shape.tp and trainer.zero.stage < 3:  # each rank holds the very slices that its engine needs
        if engine:
            engine.load_weights(((name, p.data) for name, p in trainer.parameters.items()), version, sliced=True)
        return
    wholes = broadcast_weights(trainer)
    if engine:
        engine.load_weights(wholes, version)
    else:
        for _ in wholes:  # takes part in every broadcast
            pass


def broadcast_weights(trainer: Trainer, bucket_numel: int = BUCKET_NUMEL) -> Iterator[tuple[str, Tensor]]:
    """(name, whole fp32 tensor) on every rank, a bucket of them in memory at a time: small tensors share one broadcast."""
    names: list[str] = []
    wholes: list[Tensor] = []  # on rank 0
    size = 0
    for name, whole in trainer.whole_tensors():
        names.append(name)
        wholes += [] if whole is None else [whole]
        size += trainer.slices.whole_shape(name, trainer.shapes[name]).numel()
        if size >= bucket_numel:
            yield from _broadcast(trainer, names, wholes)
            names, wholes, size = [], [], 0
    yield from _broadcast(trainer, names, wholes)


def _broadcast(trainer: Trainer, names: list[str], wholes: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    shapes = [trainer.slices.whole_shape(name, trainer.shapes[name]) for name in names]
    if trainer.mesh.shape.world_size > 1 and names:
        sizes = [shape.numel() for shape in shapes]
        flat = torch.cat([whole.reshape(-1) for whole in wholes]) if wholes else torch.empty(sum(sizes))
        dist.broadcast(flat, 0)
        wholes = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes)]
    yield from zip(names, wholes, strict=True)

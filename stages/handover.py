"""New weights from the trainer to the rollout engine of the same processes, in memory. Bytes travel, so no value changes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from stages.engine import LockstepEngine
from stages.mesh import Mesh
from stages.trainer import Trainer


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


def broadcast_weights(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """(name, whole fp32 tensor) on every rank, one in memory at a time."""
    for name, whole in trainer.whole_tensors():
        if trainer.mesh.shape.world_size > 1:
            shape = trainer.slices.whole_shape(name, trainer.shapes[name])
            whole = torch.empty(shape) if whole is None else whole.contiguous()
            dist.broadcast(whole, 0)
        assert whole is not None
        yield name, whole

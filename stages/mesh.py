"""The mesh of one rank: its coordinates and process groups, and the view of them that DeepSpeed asks for (`mpu`)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pipeline.layout import MeshShape

Group = dist.ProcessGroup | None


class Mesh:
    """Coordinates (t, c, d) of `rank` in `shape`, and its groups; a group is None when it has one rank.

    tp_group: tensor-parallel ranks, in the order of t. cp_group: of one sample. dp_group: of the same token tiles.
    grad_group: ranks that hold the same parameter slice, cp x dp. Every rank of the world must construct its Mesh at the same point.
    spare: ranks of the world that come after the mesh's own and take no part in it.
    """

    def __init__(self, shape: MeshShape, rank: int, spare: int = 0):
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != shape.world_size + spare or not 0 <= rank < world:
            raise ValueError(
                f"layout tp={shape.tp} cp={shape.cp} dp={shape.dp} needs {shape.world_size} ranks; this is rank {rank} of {world}"
            )
        self.shape, self.rank, self.spare = shape, rank, spare
        self.takes_part = rank < shape.world_size
        self.t, self.c, self.d = shape.coordinates(rank)
        self.tp_group = self._own_group(shape.tp_groups())
        self.cp_group = self._own_group(shape.cp_groups())
        self.grad_group = self._own_group(shape.gradient_groups())
        data = [[shape.rank(t, c, d) for d in range(shape.dp)] for t in range(shape.tp) for c in range(shape.cp)]
        self.dp_group = self.grad_group if shape.cp == 1 else self._own_group(data)
        self._alone: Group = None

    def _own_group(self, all_groups: list[list[int]]) -> Group:
        """Creates the groups of one axis (all ranks create all of them, in the same order) and returns the own one."""
        if len(all_groups[0]) == 1:
            return None
        if len(all_groups) == 1 and not self.spare:
            return dist.group.WORLD
        groups: list[Any] = [dist.new_group(ranks) for ranks in all_groups]
        return next((g for g, ranks in zip(groups, all_groups, strict=True) if self.rank in ranks), None)

    @property
    def tp_ranks(self) -> list[int]:
        """Global ranks of the tensor-parallel group, in the order of t."""
        return [self.shape.rank(t, self.c, self.d) for t in range(self.shape.tp)]

    @property
    def grad_ranks(self) -> list[int]:
        """Global ranks of the gradient group, in group order."""
        return self.shape.gradient_groups()[self.t]

    # --- what DeepSpeed calls; unlike ours, its groups are never None, so a group of one rank is made when it asks ---------------
    def _group_or_alone(self, group: Group) -> Group:
        if group is not None:
            return group
        if self._alone is None:
            alone: Any = dist.group.WORLD if self.shape.world_size == 1 else dist.new_group([self.rank], use_local_synchronization=True)
            self._alone = alone
        return self._alone

    def get_model_parallel_group(self) -> Group:
        return self._group_or_alone(self.tp_group)

    def get_model_parallel_rank(self) -> int:
        return self.t

    def get_model_parallel_world_size(self) -> int:
        return self.shape.tp

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> Group:
        """The gradient group: for ZeRO, context-parallel ranks are data-parallel ones."""
        return self._group_or_alone(self.grad_group)

    def get_data_parallel_rank(self) -> int:
        return self.c + self.shape.cp * self.d

    def get_data_parallel_world_size(self) -> int:
        return self.shape.cp * self.shape.dp

"""The mesh's groups, on real ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.layout import MeshShape
from stages.mesh import Mesh


def test_one_rank_has_no_groups():
    mesh = Mesh(MeshShape(), 0)
    assert (mesh.tp_group, mesh.cp_group, mesh.dp_group, mesh.grad_group) == (None,) * 4
    assert (mesh.t, mesh.c, mesh.d) == (0, 0, 0) and mesh.tp_ranks == mesh.grad_ranks == [0]


def test_a_layout_that_does_not_fit_the_world_is_refused():
    with pytest.raises(ValueError, match="tp=2 cp=1 dp=1 needs 2 ranks; this is rank 0 of 1"):
        Mesh(MeshShape(tp=2), 0)


def _members(group) -> list[int]:
    return dist.get_process_group_ranks(group)


def _rank_main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=4)
    mesh = Mesh(MeshShape(tp=2, cp=2), rank)
    assert (mesh.t, mesh.c, mesh.d) == (rank % 2, rank // 2, 0)
    assert _members(mesh.tp_group) == mesh.tp_ranks == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert _members(mesh.cp_group) == _members(mesh.grad_group) == mesh.grad_ranks == [rank % 2, rank % 2 + 2]
    assert mesh.dp_group is None
    assert mesh.get_data_parallel_rank() == mesh.c == dist.get_rank(mesh.get_data_parallel_group())
    assert mesh.get_model_parallel_rank() == mesh.t == dist.get_rank(mesh.get_tensor_model_parallel_group())
    whole = Mesh(MeshShape(cp=2, dp=2), rank)
    assert whole.tp_group is None and whole.grad_group is dist.group.WORLD
    assert _members(whole.cp_group) == [rank // 2 * 2, rank // 2 * 2 + 1] and _members(whole.dp_group) == [rank % 2, rank % 2 + 2]
    assert whole.get_data_parallel_rank() == rank and _members(whole.get_model_parallel_group()) == [rank]
    dist.destroy_process_group()


def test_groups_on_four_ranks(tmp_path):
    """In a process of its own: it forks, and this one may have threads."""
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    mp.start_processes(_rank_main, (sys.argv[1],), nprocs=4, start_method="fork")

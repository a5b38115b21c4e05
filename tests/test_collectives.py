"""Collectives over gloo: 2 and 3 ranks end with the bits of one process. One helper process imports torch once and forks the ranks."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

from kernels import collectives, reduce

N = 11  # leaves of the sums below


def leaf(i: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) * 10.0 ** (i % 5 - 2)


def tree(cuts: list[int], rank: int, merge=torch.add, rows: int = 4) -> tuple:
    """Sum (or maximum) over N leaves, cut at `cuts`."""
    nodes = [reduce.nodes(N, a, b) for a, b in itertools.pairwise(cuts)]
    own = [reduce.halving(lo, hi, lambda i: leaf(i)[:rows], merge) for lo, hi in nodes[rank]]
    return nodes, torch.stack(own) if own else torch.empty(0, rows, 3), N, merge


def check_trees(rank: int, world: int, group) -> None:
    expected = collectives.tree_all_reduce([tree([0, N], 0), tree([0, N], 0, torch.maximum, 1)])
    for cuts in ([N * r // world for r in range(world + 1)], [0, *range(3, 3 + world - 1), N], [0] * world + [N]):
        got = collectives.tree_all_reduce([tree(cuts, rank), tree(cuts, rank, torch.maximum, 1)], group)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), cuts
    assert collectives.tree_all_reduce([], group) == []
    empty = [([[(r, r + 1)] for r in range(world)], torch.empty(1, 0, 3), world)]
    assert collectives.tree_all_reduce(empty, group)[0].shape == (0, 3)
    # Control: the library's own float sum of the ranks' sums.
    cuts = [N * r // world for r in range(world + 1)]
    own = sum((leaf(i) for i in range(cuts[rank], cuts[rank + 1])), torch.zeros(4, 3))
    torch.distributed.all_reduce(own, group=group)
    assert not torch.equal(own, expected[0])


def check_rows(rank: int, world: int, group) -> None:
    for counts in ([2, 0, 5][:world], [1] * world, [0] * world):
        rows = torch.arange(sum(counts) * 6, dtype=torch.float32).view(-1, 2, 3) - 3
        ids = torch.arange(sum(counts))
        a = sum(counts[:rank])
        own = slice(a, a + counts[rank])
        got = collectives.all_gather_rows([rows[own], ids[own], rows[own, :, 0].bfloat16()], counts, group)
        assert torch.equal(got[0], rows) and torch.equal(got[1], ids) and torch.equal(got[2], rows[:, :, 0].bfloat16())
        assert torch.equal(collectives.all_gather_rows(rows[own], counts, group), rows)


def check_exact(rank: int, world: int, group) -> None:
    tensors = [torch.full((3, 2), rank + 1 << 50), torch.arange(10) * (1 - 2 * rank), torch.tensor(rank), torch.empty(0, dtype=torch.int64)]
    ranks = range(world)
    for bucket in (1, 8, 1 << 20):
        got = [t.clone() for t in tensors]
        collectives.exact_all_reduce(got, group, bucket_numel=bucket)
        assert torch.equal(got[0], torch.full((3, 2), sum(r + 1 << 50 for r in ranks)))
        assert torch.equal(got[1], sum(torch.arange(10) * (1 - 2 * r) for r in ranks)) and got[2].item() == sum(ranks)
    total = (1 << 62) - 1  # the largest that is allowed, however it is spread over the ranks
    for share in (total - 5 * (world - 1) if rank == world - 1 else 5, total // world + (total % world if rank == 0 else 0)):
        for sign in (1, -1):
            near = [torch.tensor([sign * share, rank]), torch.tensor([1])]
            collectives.exact_all_reduce(near, group)
            assert near[0].tolist() == [sign * total, sum(ranks)] and near[1].item() == world
    bad = torch.tensor([1, (1 << 62) - 1 if rank == world - 1 else 1])
    with pytest.raises(OverflowError, match="head.weight"):
        collectives.exact_all_reduce([torch.zeros(2, dtype=torch.int64), bad], group, names=["norm", "head.weight"])
    assert collectives.max_all_reduce(torch.tensor([rank, -rank]), group).tolist() == [world - 1, 0]
    mine = torch.tensor([-0.0 if rank == 0 else 0.0, 7.0 if rank == 1 else 0.0])
    for dtype in (torch.float32, torch.bfloat16):
        assert str(collectives.sum_disjoint(mine.to(dtype, copy=True), group).tolist()) == "[-0.0, 7.0]"


def check_route(rank: int, world: int, group) -> None:
    """Which tensors go through host memory, and that the route changes nothing."""
    on_gpu = type("OnGpu", (), {"is_cpu": False, "device": torch.device("cuda")})()
    assert collectives._through_host(on_gpu, group) and not collectives._through_host(torch.zeros(1), group)
    direct, torch.distributed.get_backend_config = torch.distributed.get_backend_config, lambda group: "cpu:gloo,cuda:nccl"
    assert not collectives._through_host(on_gpu, group)
    torch.distributed.get_backend_config = direct
    collectives._through_host = lambda tensor, group: True
    for check in (check_trees, check_rows, check_exact):
        check(rank, world, group)


def run_rank(rank: int, world: int, port: int) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, world, rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for check in (check_trees, check_rows, check_exact, check_route):
        check(rank, world, torch.distributed.group.WORLD)
    torch.distributed.barrier()


def main() -> int:
    """Fork the ranks before any thread exists; exit code 0 when all of them pass."""
    failed = 0
    for world in (2, 3):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        children = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    run_rank(rank, world, port)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.append(pid)
        failed += sum(os.waitpid(pid, 0)[1] != 0 for pid in children)
    return failed


def test_two_and_three_ranks():
    root = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_no_group_communicates_nothing():
    values = torch.stack([leaf(i) for i in range(N)])
    nodes = [[(i, i + 1) for i in range(N)]]
    expected = reduce.halving(0, N, leaf)
    assert torch.equal(collectives.tree_all_reduce([(nodes, values, N)])[0], expected)
    assert collectives.all_gather_rows(values, [N]) is values
    acc = torch.tensor([5])
    collectives.exact_all_reduce(acc)
    assert acc.item() == 5
    with pytest.raises(OverflowError, match="tensor 0"):
        collectives.exact_all_reduce(torch.tensor([1 << 62]))
    with pytest.raises(ValueError, match="do not fit"):
        collectives.tree_all_reduce([([[(0, 1)]], values, N)])


if __name__ == "__main__":
    sys.exit(main())

"""What is certified of kernels/collectives.py, with real processes: 2 and 3 ranks on gloo, and on NCCL where there is a GPU for each.

tree all-reduce   the root of a tree whose leaves are cut over ranks = the tree on one rank
linear            a tensor-parallel linear layer, its partial sums combined over the ranks = the whole layer
rows              rows gathered from uneven ranks; exact sums: integers; disjoint sums: the owner's bytes, -0 and NaN among them
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from kernels import collectives, linear, reduce
from kernels.certify.core import Case
from kernels.certify.setting import Setting

DTYPES = (torch.float32,)
LEAVES, LEAF = 11, 16
TIMEOUT = timedelta(seconds=60)


def cases(s: Setting) -> Iterator[Case]:
    if s.device == "interpreter":
        return  # communication holds no Triton
    for backend, world in runs(s):
        for rank in range(world):
            for name in CHECKS:
                yield Case(
                    name, f"rank {rank} of {world}, {backend}",
                    lambda a=(s.device, backend, world), r=rank, n=name: ranks(*a)[r][n], lambda n=name, w=world: CHECKS[n](s, 0, w, False),
                )  # fmt: skip


def runs(s: Setting) -> Iterator[tuple[str, int]]:
    for world in (2,) if s.quick else (2, 3):
        yield "gloo", world
        if s.device == "cuda" and torch.cuda.device_count() >= world and dist.is_nccl_available():
            yield "nccl", world


@lru_cache(maxsize=2)
def ranks(device: str, backend: str, world: int) -> list[dict[str, list[Tensor]]]:
    """Starts the ranks; the results of every check of each."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(one_rank, (device, backend, world, folder), nprocs=world)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(world)]


def one_rank(rank: int, device: str, backend: str, world: int, folder: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    s = Setting(device)
    results = {name: [t.cpu() for t in check(s, rank, world, True)] for name, check in CHECKS.items()}
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def cut(n: int, world: int, rank: int) -> tuple[int, int]:
    """Rank 0 gets the least, so that ranks are uneven."""
    return n * rank * rank // world**2, n * (rank + 1) ** 2 // world**2


def tree(s: Setting, rank: int, world: int, shared: bool) -> list[Tensor]:
    leaf = lambda i: s.values(4, 3, seed=i)  # noqa: E731
    merges = (torch.add, torch.maximum)
    if not shared:
        return [reduce.halving(0, LEAVES, leaf, merge) for merge in merges]
    nodes = [reduce.nodes(LEAVES, *cut(LEAVES, world, r)) for r in range(world)]
    own = [[reduce.halving(a, b, leaf, merge) for a, b in nodes[rank]] for merge in merges]
    partials = [
        collectives.Partial(nodes, torch.stack(v) if v else leaf(0).new_empty(0, 4, 3), LEAVES, merge) for v, merge in zip(own, merges)
    ]
    return collectives.tree_all_reduce(partials, dist.group.WORLD)


def split_linear(s: Setting, rank: int, world: int, shared: bool) -> list[Tensor]:
    x, w = s.values(5, LEAF * LEAVES, seed=1), s.values(20, LEAF * LEAVES, seed=2)
    if not shared:
        return [linear.forward(x, w, LEAF)]
    nodes = [reduce.nodes(LEAVES, *cut(LEAVES, world, r)) for r in range(world)]
    own = [linear.forward(x[:, a * LEAF : b * LEAF], w[:, a * LEAF : b * LEAF], LEAF) for a, b in nodes[rank]]
    values = torch.stack(own) if own else x.new_empty(0, 5, 20)
    return collectives.tree_all_reduce([collectives.Partial(nodes, values, LEAVES)], dist.group.WORLD)


def rows(s: Setting, rank: int, world: int, shared: bool) -> list[Tensor]:
    whole = [s.values(9, 2, 3, seed=1), s.on(torch.arange(9)), s.values(9, 5, seed=2).bfloat16()]
    cuts = [cut(9, world, r) for r in range(world)]
    own = [t[slice(*cuts[rank])] for t in whole]
    return collectives.all_gather_rows(own, [b - a for a, b in cuts], dist.group.WORLD) if shared else whole


def exact(s: Setting, rank: int, world: int, shared: bool) -> list[Tensor]:
    """A tensor that shares a call, one that goes alone, one of sums that come near 2^62."""
    parts = [
        [s.on(torch.arange(10) * (1 - 2 * r)), s.on(torch.full((3, 2), r + 1 << 50)), s.on(torch.tensor([(1 << 62) // world - 1]))]
        for r in range(world)
    ]
    if not shared:
        return [torch.stack(same).sum(0) for same in zip(*parts)]
    collectives.exact_all_reduce(parts[rank], dist.group.WORLD, bucket_numel=8)
    return parts[rank]


def disjoint(s: Setting, rank: int, world: int, shared: bool) -> list[Tensor]:
    whole = s.on(torch.tensor([1.0, -0.0, 2.0**-140, float("inf")]).repeat(world))
    if not shared:
        return [whole, s.counts(world - 1)]
    own = torch.zeros_like(whole)
    own[rank::world] = whole[rank::world]
    return [collectives.sum_disjoint(own, dist.group.WORLD), collectives.max_all_reduce(s.counts(rank), dist.group.WORLD)]


CHECKS = {"tree all-reduce": tree, "linear": split_linear, "rows": rows, "exact sums": exact, "disjoint sums": disjoint}

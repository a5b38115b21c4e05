"""Collectives whose result does not depend on how many ranks share the work.

Floats are never summed by the communication library: ranks gather partial sums and each finishes the same fixed tree, or they add integers.
On the CPU latency dominates, so several tensors travel in one call. A group of None, or of one rank, communicates nothing.
Every rank of the group must make the same calls with the same layouts.
Tensors lie on the CPU for a gloo group and on the GPU for an NCCL group. A gloo group takes GPU tensors too, by way of host memory: not
every version of gloo has all of the calls below for them. Results lie where the arguments do. Integers and bytes travel, so no route
changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import reduce

Group = dist.ProcessGroup | None


def size(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


class Partial(NamedTuple):
    """What the ranks of a group hold of one sum over `num_leaves` leaves."""

    nodes: Sequence[Sequence[reduce.Node]]  # of every rank of the group, in the order of its `values`; together they cover the tree
    values: Tensor  # [len(nodes[own rank]), ...]: own partial sums
    num_leaves: int
    merge: Callable[[Tensor, Tensor], Tensor] = torch.add


def tree_all_reduce(partials: Sequence[Partial | tuple], group: Group = None) -> list[Tensor]:
    """Root of each partial's halving tree, on every rank, by one all_gather. `partials` share a dtype; a plain tuple is read as Partial."""
    sums = [p if isinstance(p, Partial) else Partial(*p) for p in partials]
    rank = 0 if size(group) == 1 else dist.get_rank(group)
    for p in sums:
        if len(p.nodes) != size(group) or len(p.nodes[rank]) != len(p.values):
            raise ValueError(f"nodes of {len(p.nodes)} ranks and {len(p.values)} values do not fit rank {rank} of {size(group)}")
    payloads = [torch.cat([p.values.reshape(-1) for p in sums])] if sums else []
    if size(group) > 1:
        lengths = [sum(len(p.nodes[r]) * prod(p.values.shape[1:]) for p in sums) for r in range(size(group))]
        payloads = _gather(payloads[0], lengths, group) if payloads else []
    results, offsets = [], [0] * size(group)
    for p in sums:
        parts: dict[reduce.Node, Tensor] = {}
        for r, own in enumerate(p.nodes):
            for node in own:
                parts[node] = payloads[r].narrow(0, offsets[r], prod(p.values.shape[1:])).view(p.values.shape[1:])
                offsets[r] += parts[node].numel()
        results.append(reduce.combine(parts, p.num_leaves, p.merge))
    return results


@overload
def all_gather_rows(tensors: Tensor, counts: Sequence[int], group: Group = None) -> Tensor: ...
@overload
def all_gather_rows(tensors: Sequence[Tensor], counts: Sequence[int], group: Group = None) -> list[Tensor]: ...
def all_gather_rows(tensors: Tensor | Sequence[Tensor], counts: Sequence[int], group: Group = None) -> Tensor | list[Tensor]:
    """Rows (dim 0) of all ranks, in rank order. counts: rows of each rank, the same for all `tensors`, whose dtypes may differ.

    Bytes travel, so no value changes. Returns one tensor for one tensor, a list for a list.
    """
    if isinstance(tensors, Tensor):
        return all_gather_rows([tensors], counts, group)[0]
    if size(group) == 1:
        return list(tensors)
    own = counts[dist.get_rank(group)]
    if any(len(t) != own for t in tensors):
        raise ValueError(f"expected {own} rows, got {[len(t) for t in tensors]}")
    widths = [prod(t.shape[1:]) * t.element_size() for t in tensors]
    flat = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in tensors])
    parts = _gather(flat, [count * sum(widths) for count in counts], group)
    results = []
    for i, (t, width) in enumerate(zip(tensors, widths, strict=True)):
        pieces = [part.narrow(0, c * sum(widths[:i]), c * width) for part, c in zip(parts, counts, strict=True)]
        results.append(torch.cat(pieces).view(t.dtype).view(sum(counts), *t.shape[1:]))
    return results


def exact_all_reduce(
    tensors: Tensor | Sequence[Tensor], group: Group = None, names: Sequence[str] | None = None, bucket_numel: int = 1 << 22
) -> None:
    """Integer SUM of int64 tensors over the group, in place.

    OverflowError on every rank, with the tensor's name (or index), when a total reaches 2^62 in magnitude: whether it does must not depend
    on how many ranks share it. Neighbours in the list share a call up to `bucket_numel` elements; larger tensors go alone, without a copy.
    """
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not tensors:
        return
    limit = (1 << 62) // size(group)  # below it on every rank, no total can reach 2^62
    nothing = torch.zeros(2, dtype=torch.int64, device=tensors[0].device)
    extremes = torch.stack([torch.stack(t.aminmax()) if t.numel() else nothing for t in tensors])
    flags = ((extremes[:, 0] <= -limit) | (extremes[:, 1] >= limit)).to(torch.int64)
    large = set(max_all_reduce(flags, group).nonzero().flatten().tolist())
    bad = [i for i in sorted(large) if not _sum_large(tensors[i], group)]
    bucket, filled = [], 0
    for i, t in enumerate(tensors):
        if i in large:
            continue
        if filled + t.numel() > bucket_numel and filled:
            _sum_bucket(bucket, group)
            bucket, filled = [], 0
        bucket.append(t)
        filled += t.numel()
    _sum_bucket(bucket, group)
    for i in bad:
        raise OverflowError(f"exact sum of {names[i] if names else f'tensor {i}'} reached 2^62: lower the scale")


def _sum_large(tensor: Tensor, group: Group) -> bool:
    """Integer SUM in place by halves of 32 bits, which cannot wrap; False when a total reaches 2^62 in magnitude."""
    mask = (1 << 32) - 1
    halves = torch.stack([tensor >> 32, tensor & mask])
    _all_reduce(halves, dist.ReduceOp.SUM, group)
    high, low = halves[0] + (halves[1] >> 32), halves[1] & mask
    tensor.copy_((high << 32) + low)
    fits = (high >= -(1 << 30)) & (high < 1 << 30) & ((high > -(1 << 30)) | (low > 0))
    return bool(fits.all())


def max_all_reduce(tensor: Tensor, group: Group = None) -> Tensor:
    """Elementwise MAX over the group, in place; the maximum is exact in every dtype."""
    _all_reduce(tensor, dist.ReduceOp.MAX, group)
    return tensor


def sum_disjoint(tensor: Tensor, group: Group = None) -> Tensor:
    """Contiguous fp32 or bf16 tensor of which every element is +0.0 on all ranks but one: the one rank's bytes, on every rank, in place.

    Bit patterns are added as integers, so -0.0 and NaN payloads arrive unchanged.
    """
    _all_reduce(tensor.view(torch.int32 if tensor.element_size() == 4 else torch.uint8), dist.ReduceOp.SUM, group)
    return tensor


def _gather(flat: Tensor, lengths: Sequence[int], group: Group) -> list[Tensor]:
    """1-D tensors of all ranks, of uneven lengths, by one all_gather of the longest."""
    longest = max(lengths)
    if longest == 0:
        return [flat.new_empty(0) for _ in lengths]
    padded = flat if flat.numel() == longest else torch.cat([flat, flat.new_zeros(longest - flat.numel())])
    sent = padded.cpu() if _through_host(flat, group) else padded
    out = sent.new_empty(len(lengths), longest)
    dist.all_gather_into_tensor(out.view(-1), sent, group)
    out = out.to(flat.device)
    return [row[:n] for row, n in zip(out, lengths, strict=True)]


def _sum_bucket(bucket: list[Tensor], group: Group) -> None:
    if size(group) == 1 or not bucket:
        return
    if len(bucket) == 1 and bucket[0].is_contiguous():
        _all_reduce(bucket[0], dist.ReduceOp.SUM, group)
        return
    flat = torch.cat([t.reshape(-1) for t in bucket])
    _all_reduce(flat, dist.ReduceOp.SUM, group)
    for t, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
        t.copy_(part.view(t.shape))


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: Group) -> None:
    if size(group) == 1:
        return
    if _through_host(tensor, group):
        host = tensor.cpu()
        dist.all_reduce(host, op, group)
        tensor.copy_(host)
    else:
        dist.all_reduce(tensor, op, group)


def _through_host(tensor: Tensor, group: Group) -> bool:
    """Whether the group would hand this GPU tensor to gloo; "cpu:gloo,cuda:nccl" has a library for each device."""
    if tensor.is_cpu:
        return False
    libraries = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return libraries.get(tensor.device.type) == "gloo"

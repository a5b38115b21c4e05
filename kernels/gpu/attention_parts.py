"""What the attention kernels share: tiles of row-heads, tiles of keys, and the aligned tree.

A tile holds BM row-heads of one sequence and one key/value head: row-head i is row q_start + i // GROUP at head
kv_head * GROUP + i % GROUP, so that the query heads of a group read their keys together. Keys and head dims are padded to powers of two;
padding is zero.

The aligned tree is a binary counter over the leaves: leaf i first joins the nodes of the trailing ones of i, the last leaf all its ones.
Leaves that a row doesn't see lie on the right, have the maximum ABSENT and zeros, and change no bit of what they are merged with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import math

ABSENT = tl.constexpr(-3.4028234663852886e38)  # the maximum over no keys


def query_tiles(seqs: Tensor, rows: int, group: int, block: int) -> Tensor:
    """int64 [T,2] = (sequence, first row-head). T follows from shapes alone, so that nothing waits for the device: surplus tiles are empty.

    The sequences' query rows must not overlap, as everywhere.
    """
    counts = torch.div((seqs[:, 1] - seqs[:, 0]) * group + (block - 1), block, rounding_mode="floor")
    ends = torch.cumsum(counts, 0)
    tile = torch.arange(triton.cdiv(rows * group, block) + len(seqs), device=seqs.device)
    sequence = torch.searchsorted(ends, tile, right=True).clamp_(max=len(seqs) - 1)
    return torch.stack((sequence, (tile - (ends - counts)[sequence]) * block), 1)


@triton.jit
def locate(tiles, seqs, q_pos, tile, offset, kv_head, Hq, GROUP: tl.constexpr, BM: tl.constexpr):
    """Of a tile, from its row-head `offset` on: sequence, k_start, indices of the row-heads, which are real, how many keys each sees."""
    s = tl.load(tiles + 2 * tile)
    i = tl.load(tiles + 2 * tile + 1) + offset + tl.arange(0, BM)
    q_stop, k_start, k_len = tl.load(seqs + 4 * s + 1), tl.load(seqs + 4 * s + 2), tl.load(seqs + 4 * s + 3)
    row = tl.load(seqs + 4 * s) + i // GROUP
    real = row < q_stop
    seen = tl.minimum(tl.load(q_pos + row, mask=real, other=-1).to(tl.int64) + 1, k_len).to(tl.int32)
    return s, k_start, row * Hq + kv_head * GROUP + i % GROUP, real, seen


@triton.jit
def load_rows(x, index, real, D: tl.constexpr, BD: tl.constexpr):
    """Rows `index` of x [*,D] -> [len(index),BD], zero where they aren't real."""
    d = tl.arange(0, BD)
    return tl.load(x + index[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_rows(x, index, real, value, D: tl.constexpr, BD: tl.constexpr):
    d = tl.arange(0, BD)
    tl.store(x + index[:, None] * D + d[None, :], math.stored(value, x.dtype.element_ty), mask=real[:, None] & (d < D)[None, :])


@triton.jit
def load_keys(
    x, stride, pages, k_start, first, stop,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys first .. first + BN - 1 of one head -> [BN,BD], zero from `stop` on.

    PAGE 0: rows from k_start on; else `pages` is the sequence's row of the block table. ONE_PAGE: no block of keys crosses a page.
    """
    j, d = tl.arange(0, BN), tl.arange(0, BD)
    if PAGE == 0:
        at = x + (k_start + first) * stride + (j * stride)[:, None] + d[None, :]
    elif ONE_PAGE:
        page = tl.load(pages + first // PAGE).to(tl.int64)
        at = x + (page * PAGE + first % PAGE) * stride + (j * stride)[:, None] + d[None, :]
    else:
        page = tl.load(pages + (first + j) // PAGE, mask=first + j < stop, other=0).to(tl.int64)
        at = x + ((page * PAGE + (first + j) % PAGE) * stride)[:, None] + d[None, :]
    if MASKED or D < BD:
        return tl.load(at, mask=(first + j < stop)[:, None] & (d < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def exp_difference(s, m, NARROW: tl.constexpr):
    """exp(s - m). NARROW (bf16): by the card's own exp2, a few ulp, far below the rounding to bf16 that follows."""
    if NARROW:
        return tl.exp2(tl.fma(s, tl.full(s.shape, 1.4426950408889634, tl.float32), tl.broadcast_to(m * -1.4426950408889634, s.shape)))
    return math.exp(s - m)


@triton.jit
def joins(leaf, last):
    """Bits of the levels at which this leaf joins a left sibling."""
    return tl.where(last, leaf, leaf & ~(leaf + 1))


@triton.jit
def sum_node(x, stack, leaf, first_leaf, last):
    """Adds to leaf x [A,BD] the nodes on the `stack` [levels,A,BD] that it completes -> sum, its level. Leaves start at first_leaf."""
    a = tl.arange(0, x.shape[0])[:, None] * x.shape[1] + tl.arange(0, x.shape[1])[None, :]
    merges = joins(leaf, last)
    level = leaf * 0
    while (merges >> level) != 0:
        if (((merges >> level) & 1) != 0) & (((leaf >> level) << level) > first_leaf):
            tl.debug_barrier()  # other threads of the program may have written what this one reads
            x = tl.load(stack + level * (x.shape[0] * x.shape[1]) + a) + x
        level += 1
    return x, level


@triton.jit
def push_sum(x, stack, level):
    a = tl.arange(0, x.shape[0])[:, None] * x.shape[1] + tl.arange(0, x.shape[1])[None, :]
    tl.debug_barrier()
    tl.store(stack + level * (x.shape[0] * x.shape[1]) + a, x)

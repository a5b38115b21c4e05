"""Attention backward: dq by tiles of row-heads over the leaves of keys, dk and dv by tiles of keys over the tiles of queries.

Probabilities come again from scores and the saved m and l. Sums over leaves are aligned trees whose pending nodes lie in memory. In bf16,
probabilities and the gradients of scores are rounded to bf16 before the products that use them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import math
from kernels.gpu.attention_parts import exp_difference, load_keys, load_rows, locate, push_sum, query_tiles, store_rows, sum_node


@triton.jit
def delta_kernel(do, o, delta, count, D: tl.constexpr, BLOCK: tl.constexpr):
    """delta [count]: the chain over d of do * o."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    total = tl.zeros((BLOCK,), tl.float32)
    for d in range(D):
        a = tl.load(do + i * D + d, mask=mask, other=0.0).to(tl.float32)
        total = math.fma(a, tl.load(o + i * D + d, mask=mask, other=0.0).to(tl.float32), total)
    tl.store(delta + i, total, mask=mask)


@triton.jit
def backward_q_kernel(
    do, q, k, k_stride, k_head, v, v_stride, v_head, m_in, l_in, delta_in, seqs, q_pos, tiles, Hq, scale, stack, levels, dq,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, LEAF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of row-heads, kv heads)."""
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    _, k_start, index, real, seen = locate(tiles, seqs, q_pos, tile, 0, kv_head, Hq, GROUP, BM)
    stack += (tile * tl.num_programs(1) + kv_head).to(tl.int64) * levels * (BM * BD)
    k, v = k + kv_head * k_head, v + kv_head * v_head
    most = tl.max(seen)
    leaves = tl.cdiv(most, LEAF)
    if leaves > 0:
        query, gradient = load_rows(q, index, real, D, BD), load_rows(do, index, real, D, BD)
        m, delta = tl.load(m_in + index, mask=real, other=0.0)[:, None], tl.load(delta_in + index, mask=real, other=0.0)[:, None]
        share = math.div(1.0, tl.load(l_in + index, mask=real, other=1.0))[:, None]
        for leaf in range(leaves):
            stop = tl.minimum((leaf + 1) * LEAF, most)
            acc = tl.zeros((BM, BD), tl.float32)
            for first in range(leaf * LEAF, stop, BN):
                keys = load_keys(k, k_stride, seqs, k_start, first, stop, D, BD, BN, 0, False, True)
                values = load_keys(v, v_stride, seqs, k_start, first, stop, D, BD, BN, 0, False, True)
                zero = tl.zeros((BM, BN), tl.float32)
                p = exp_difference(math.dot(query, tl.trans(keys), zero) * scale, m, NARROW) * share
                ds = p * (math.dot(gradient, tl.trans(values), zero) - delta) * scale
                key = first + tl.arange(0, BN)
                ds = tl.where((key < stop)[None, :] & (key[None, :] < seen[:, None]), ds, 0.0)
                acc = math.dot(math.stored(ds, keys.dtype), keys, acc)
            last = leaf == leaves - 1
            acc, level = sum_node(acc + 0.0, stack, leaf, 0, last)
            if last:
                store_rows(dq, index, real, acc, D, BD)
            else:
                push_sum(acc, stack, level)


@triton.jit
def first_row(q_pos, q_start, q_stop, position):
    """The first of the rows, whose positions rise, at `position` or beyond. Where positions have no gaps, no step is taken."""
    row = q_start + tl.maximum(position - tl.load(q_pos + q_start).to(tl.int64), 0)
    row = tl.minimum(row, q_stop)
    while (row > q_start) & (tl.load(q_pos + tl.maximum(row - 1, q_start)).to(tl.int64) >= position):
        row -= 1
    return row


@triton.jit
def backward_kv_kernel(
    do, q, k, k_stride, k_head, v, v_stride, v_head, m_in, l_in, delta_in, seqs, q_pos, tiles, Hq, scale, stack, levels, dk, dv,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, LEAF: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of keys, kv heads). tiles [T,4]: sequence, first key, end, row of the first in dk and dv.

    A leaf is a chain over (head of the group, row) of the query rows at LEAF positions; absent rows have p = 0 and add nothing.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    s, first, stop = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1), tl.load(tiles + 4 * tile + 2)
    out = tl.load(tiles + 4 * tile + 3) + tl.arange(0, BN)
    q_start, q_stop, k_start = tl.load(seqs + 4 * s), tl.load(seqs + 4 * s + 1), tl.load(seqs + 4 * s + 2)
    k, v = k + kv_head * k_head, v + kv_head * v_head
    keys = load_keys(k, k_stride, seqs, k_start, first, stop, D, BD, BN, 0, False, True)
    values = load_keys(v, v_stride, seqs, k_start, first, stop, D, BD, BN, 0, False, True)
    stack += (tile * tl.num_programs(1) + kv_head).to(tl.int64) * levels * (2 * BN * BD)
    key = first + tl.arange(0, BN)
    result_k, result_v = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BD), tl.float32)
    begin, end = first // LEAF, first // LEAF
    if q_start < q_stop:
        end = tl.load(q_pos + q_stop - 1).to(tl.int64) // LEAF + 1
    row = q_start
    if begin < end:
        row = first_row(q_pos, q_start, q_stop, begin * LEAF)
    for leaf in range(begin, end):
        after = row  # rows of this leaf end before it
        near = row + tl.arange(0, BR)
        for block in range(0, LEAF, BR):
            position = tl.load(q_pos + near + block, mask=near + block < q_stop, other=0x7FFFFFFF).to(tl.int64)
            after += tl.sum(tl.where(position < (leaf + 1) * LEAF, 1, 0), 0)
        acc_k, acc_v = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BD), tl.float32)
        for step in range(GROUP * tl.cdiv(after - row, BR)):
            blocks = tl.cdiv(after - row, BR)
            r = row + (step % blocks) * BR + tl.arange(0, BR)
            real = r < after
            index = r * Hq + kv_head * GROUP + step // blocks
            query, gradient = load_rows(q, index, real, D, BD), load_rows(do, index, real, D, BD)
            m, delta = tl.load(m_in + index, mask=real, other=0.0)[None, :], tl.load(delta_in + index, mask=real, other=0.0)[None, :]
            share = math.div(1.0, tl.load(l_in + index, mask=real, other=1.0))[None, :]
            position = tl.load(q_pos + r, mask=real, other=-1).to(tl.int64)
            sees = (key[:, None] <= position[None, :]) & (key < stop)[:, None]
            zero = tl.zeros((BN, BR), tl.float32)
            p = exp_difference(math.dot(keys, tl.trans(query), zero) * scale, m, NARROW) * share
            p = tl.where(sees, p, 0.0)
            ds = p * (math.dot(values, tl.trans(gradient), zero) - delta) * scale
            acc_v = math.dot(math.stored(p, gradient.dtype), gradient, acc_v)
            acc_k = math.dot(math.stored(ds, query.dtype), query, acc_k)
        row = after
        last = leaf == end - 1
        result_k, level = sum_node(acc_k + 0.0, stack, leaf, begin, last)
        result_v, _ = sum_node(acc_v + 0.0, stack + levels * (BN * BD), leaf, begin, last)
        if not last:
            push_sum(result_k, stack, level)
            push_sum(result_v, stack + levels * (BN * BD), level)
    at = out * tl.num_programs(1) + kv_head
    store_rows(dk, at, key < stop, result_k, D, BD)
    store_rows(dv, at, key < stop, result_v, D, BD)


# --- launches ----------------------------------------------------------------------------------------------------------------
def blocks(dtype: torch.dtype, head_dim: int, leaf: int, walk: int) -> tuple[dict, dict]:
    """(constants, launch options): rows of a program, and the block of the axis that it walks along, at most `walk` in bf16; the sizes
    are those that need no more registers than there are."""
    narrow = dtype == torch.bfloat16
    block = min(walk if narrow else 32, max(16, triton.next_power_of_2(leaf)))
    constants = {"D": head_dim, "BD": max(16, triton.next_power_of_2(head_dim)), "LEAF": leaf, "NARROW": narrow}
    return constants | {"rows": 64 if narrow else 16, "block": block}, {"num_warps": 8 if narrow else 4, "num_stages": 2}


def backward_q(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, m: Tensor, norm: Tensor, seqs: Tensor, q_pos: Tensor, scale: float, kv_leaf: int
) -> tuple[Tensor, Tensor]:
    """dq [M,Hq,D], delta [M,Hq]; see `kernels.attention.backward_q`."""
    do, q, o, m, norm, seqs = (t.contiguous() for t in (do, q, o, m, norm, seqs))
    dq, delta = torch.zeros_like(q), torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
    if not q.numel() or not len(seqs):
        return dq, delta
    (rows, heads, dim), kv_heads = q.shape, k.shape[1]
    row = torch.arange(rows, device=q.device)[:, None]
    unused = ~((row >= seqs[:, 0]) & (row < seqs[:, 1])).any(1)
    delta_kernel[(triton.cdiv(rows * heads, 128),)](do, o, delta, rows * heads, D=dim, BLOCK=128, **math.LAUNCH)
    delta.masked_fill_(unused[:, None], 0.0)  # a product with 0 would keep the NaN of rows of no sequence
    constants, options = blocks(q.dtype, dim, kv_leaf, 64)
    bm, bn = constants.pop("rows"), constants.pop("block")
    tiles = query_tiles(seqs, rows, heads // kv_heads, bm)
    levels = max(1, triton.cdiv(len(k), kv_leaf)).bit_length()
    stack = torch.empty((len(tiles) * kv_heads * levels, bm, constants["BD"]), dtype=torch.float32, device=q.device)
    backward_q_kernel[(len(tiles), kv_heads)](
        do, q, k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1), m, norm, delta, seqs, q_pos.contiguous(), tiles, heads,
        float(scale), stack, levels, dq, GROUP=heads // kv_heads, BM=bm, BN=bn, **constants, **options, **math.LAUNCH,
    )  # fmt: skip
    return dq, delta


def backward_kv(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, m: Tensor, norm: Tensor, delta: Tensor,
    seqs: Tensor, q_pos: Tensor, k_ranges: Tensor, scale: float, token_leaf: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dk, dv [total,Hkv,D]; see `kernels.attention.backward_kv`.

    Reads on the host k_ranges, whose total is the result's shape, and the largest position.
    """
    do, q, m, norm, delta, seqs, q_pos = (t.contiguous() for t in (do, q, m, norm, delta, seqs, q_pos))
    (rows, heads, dim), kv_heads = q.shape, k.shape[1]
    ranges = k_ranges.reshape(-1, 3).tolist()
    constants, options = blocks(q.dtype, dim, token_leaf, 32)
    bn, br = constants.pop("rows"), constants.pop("block")
    tiles, total = [], 0
    for s, a, b in ranges:
        tiles += [(s, first, b, total + first - a) for first in range(a, b, bn)]
        total += b - a
    dk, dv = (torch.zeros((total, kv_heads, dim), dtype=q.dtype, device=q.device) for _ in range(2))
    if not tiles or not rows:
        return dk, dv
    levels = (int(q_pos.max()) // token_leaf).bit_length() + 1  # positions may lie beyond the keys
    stack = torch.empty((len(tiles) * kv_heads * levels * 2, bn, constants["BD"]), dtype=torch.float32, device=q.device)
    backward_kv_kernel[(len(tiles), kv_heads)](
        do, q, k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1), m, norm, delta, seqs, q_pos, torch.tensor(tiles).to(q.device),
        heads, float(scale), stack, levels, dk, dv, GROUP=heads // kv_heads, BN=bn, BR=br, **constants, **options, **math.LAUNCH,
    )  # fmt: skip
    return dk, dv


def cases_of(kind: str, dtype: torch.dtype) -> list:
    from kernels.gpu.ahead_of_time import Case

    pointers = {"do": f"*{kind}", "q": f"*{kind}", "k": f"*{kind}", "k_stride": "i32", "k_head": "i32", "v": f"*{kind}", "v_stride": "i32"}
    pointers |= {"v_head": "i32", "m_in": "*fp32", "l_in": "*fp32", "delta_in": "*fp32", "seqs": "*i64", "q_pos": "*i64", "tiles": "*i64"}
    pointers |= {"Hq": "i32", "scale": "fp32", "stack": "*fp32", "levels": "i32"}
    aligned = tuple(name for name in pointers if name not in ("Hq", "scale", "levels"))
    cases = []
    for kernel, leaf, walk, results in ((backward_q_kernel, 128, 64, ("dq",)), (backward_kv_kernel, 64, 32, ("dk", "dv"))):
        constants, options = blocks(dtype, 128, leaf, walk)
        size, block = constants.pop("rows"), constants.pop("block")
        constants |= {"GROUP": 2, **({"BM": size, "BN": block} if kernel is backward_q_kernel else {"BN": size, "BR": block})}
        signature = pointers | dict.fromkeys(results, f"*{kind}")
        cases.append(Case(kernel, kind, signature, constants, (*aligned, *results), options, approximate=kind == "bf16"))
    signature = {"do": f"*{kind}", "o": f"*{kind}", "delta": "*fp32", "count": "i32"}
    return [*cases, Case(delta_kernel, kind, signature, {"D": 128, "BLOCK": 128}, ("do", "o", "delta"))]

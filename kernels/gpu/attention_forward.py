"""Attention forward: two schedules with the same bits. Prefill: a program per tile walks over the leaves and keeps the tree's pending nodes
in memory. Decoding: a program per tile and leaf, then a kernel that merges them.

fp32: per leaf one pass over the scores for their maximum and one for the sums (one pass, if the leaf is one block of keys), with the bits
of the CPU kernels. bf16: tensor cores; probabilities are rounded to bf16 before they meet v; the maximum runs through the blocks of a leaf
and the sums are rescaled (fixed blocks at absolute positions, so the same in every schedule). Scores, m, l and merges are fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import math
from kernels.gpu.attention_parts import ABSENT, exp_difference, joins, load_keys, load_rows, locate, query_tiles, store_rows


@triton.jit
def leaf_scores(
    q, k, k_stride, pages, k_start, first, stop, seen, scale,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores [BM,BN] of one block of keys; ABSENT where a row doesn't see the key."""
    keys = load_keys(k, k_stride, pages, k_start, first, stop, D, BD, BN, PAGE, ONE_PAGE, MASKED)
    s = math.dot(q, tl.trans(keys), tl.zeros((q.shape[0], BN), tl.float32)) * scale
    if MASKED:
        key = first + tl.arange(0, BN)
        s = tl.where((key < stop)[None, :] & (key[None, :] < seen[:, None]), s, ABSENT)
    return s


@triton.jit
def leaf_sums(
    m, l, o, q, k, k_stride, v, v_stride, pages, k_start, begin, end, stop, seen, scale, D: tl.constexpr, BD: tl.constexpr,
    BN: tl.constexpr, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr, ONLINE: tl.constexpr, NARROW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Continues a leaf's m [BM], l [BM] or (fp32: equal columns of a product with ones) [BM,16], and o [BM,BD] over keys [begin, end)."""
    for first in range(begin, end, BN):
        s = leaf_scores(q, k, k_stride, pages, k_start, first, stop, seen, scale, D, BD, BN, PAGE, ONE_PAGE, MASKED)
        if ONLINE:
            top = tl.maximum(m, tl.max(s, 1))
            shrink = exp_difference(m, top, NARROW)
            if MASKED:
                shrink = tl.where(m == top, 1.0, shrink)  # exp_difference(ABSENT, ABSENT) may be inf
            l = l * (shrink if NARROW else shrink[:, None])
            o = o * shrink[:, None]
            m = top
        p = exp_difference(s, m[:, None], NARROW)
        if MASKED:
            key = first + tl.arange(0, BN)
            p = tl.where((key < stop)[None, :] & (key[None, :] < seen[:, None]), p, 0.0)
        values = load_keys(v, v_stride, pages, k_start, first, stop, D, BD, BN, PAGE, ONE_PAGE, MASKED)
        if NARROW:
            l += tl.sum(p, 1)
        else:
            l = math.dot(p, tl.full((BN, 16), 1.0, tl.float32), l)
        o = math.dot(math.stored(p, values.dtype), values, o)
    return m, l, o


@triton.jit
def forward_leaf(
    q, k, k_stride, v, v_stride, pages, k_start, first, most, least, seen, scale, D: tl.constexpr, BD: tl.constexpr,
    LEAF: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr, ONLINE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """m, l [BM] and o [BM,BD] of the leaf that begins at key `first`; rows of the tile see between `least` and `most` keys."""
    stop = tl.minimum(first + LEAF, most)
    m, o = tl.full((q.shape[0],), ABSENT, tl.float32), tl.zeros((q.shape[0], BD), tl.float32)
    if NARROW:
        l = tl.zeros((q.shape[0],), tl.float32)
        whole = first + tl.maximum(tl.minimum(first + LEAF, least) - first, 0) // BN * BN  # up to here every row sees every key
        m, l, o = leaf_sums(
            m, l, o, q, k, k_stride, v, v_stride, pages, k_start, first, whole, stop, seen, scale, D, BD, BN, PAGE, ONE_PAGE,
            True, True, False,
        )  # fmt: skip
        m, l, o = leaf_sums(
            m, l, o, q, k, k_stride, v, v_stride, pages, k_start, whole, stop, stop, seen, scale, D, BD, BN, PAGE, ONE_PAGE,
            True, True, True,
        )  # fmt: skip
    else:
        columns = tl.zeros((q.shape[0], 16), tl.float32)
        if not ONLINE:
            for block in range(first, stop, BN):
                s = leaf_scores(q, k, k_stride, pages, k_start, block, stop, seen, scale, D, BD, BN, PAGE, ONE_PAGE, True)
                m = tl.maximum(m, tl.max(s, 1))
        m, columns, o = leaf_sums(
            m, columns, o, q, k, k_stride, v, v_stride, pages, k_start, first, stop, stop, seen, scale, D, BD, BN, PAGE, ONE_PAGE,
            ONLINE, False, True,
        )  # fmt: skip
        l = tl.max(columns, 1)
    return m, l, o + 0.0


@triton.jit
def node_pointers(nodes, slots, slot, rows, NODE: tl.constexpr, BD: tl.constexpr):
    """Of o [slot,NODE,BD], then m and l [slot,2,NODE] behind all o: pointers of `rows` in a program's workspace of `slots` nodes."""
    d = tl.arange(0, BD)
    stats = nodes + slots * (NODE * BD) + slot * (2 * NODE) + rows
    return stats, stats + NODE, nodes + slot * (NODE * BD) + rows[:, None] * BD + d[None, :]


@triton.jit
def merge_nodes(m, l, o, nodes, slots, leaf, last, rows, real, NODE: tl.constexpr, BD: tl.constexpr, IN_PLACE: tl.constexpr):
    """Merges leaf (m, l, o) with the pending nodes that it completes -> node and its level.

    A node lies in the slot of its level, or, IN_PLACE, in that of its first leaf.
    """
    merges = joins(leaf, last)
    level = leaf * 0
    while (merges >> level) != 0:
        if ((merges >> level) & 1) != 0:
            slot = level
            if IN_PLACE:
                slot = ((leaf >> level) - 1) << level
            at_m, at_l, at_o = node_pointers(nodes, slots, slot, rows, NODE, BD)
            tl.debug_barrier()  # other threads of the program may have written what this one reads
            left = tl.load(at_m, mask=real, other=ABSENT)
            top = math.maximum(left, m)
            wa, wb = math.exp(left - top), math.exp(m - top)
            l = tl.fma(l, wb, tl.load(at_l, mask=real, other=0.0) * wa) + 0.0
            left_o = tl.load(at_o, mask=real[:, None], other=0.0)
            o = tl.fma(o, tl.broadcast_to(wb[:, None], o.shape), left_o * wa[:, None]) + 0.0
            m = top
        level += 1
    return m, l, o, level


@triton.jit
def store_node(m, l, o, nodes, slots, slot, rows, real, NODE: tl.constexpr, BD: tl.constexpr):
    at_m, at_l, at_o = node_pointers(nodes, slots, slot, rows, NODE, BD)
    tl.debug_barrier()
    tl.store(at_m, m, mask=real)
    tl.store(at_l, l, mask=real)
    tl.store(at_o, o, mask=real[:, None])


@triton.jit
def store_result(m, l, o, out, m_out, l_out, index, real, D: tl.constexpr, BD: tl.constexpr):
    safe = tl.where(real, l, 1.0)
    store_rows(out, index, real, math.div(o, tl.broadcast_to(safe[:, None], o.shape)), D, BD)
    tl.store(m_out + index, m, mask=real)
    tl.store(l_out + index, l, mask=real)


@triton.jit
def forward_kernel(
    q, k, k_stride, k_head, v, v_stride, v_head, table, table_stride, seqs, q_pos, tiles, Hq, scale, nodes, slots, out, m_out, l_out,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, LEAF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PAGE: tl.constexpr, ONE_PAGE: tl.constexpr, ONLINE: tl.constexpr, NARROW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv heads, SPLIT: leaves). SPLIT: one leaf, its node goes to the workspace; else all leaves, merged, and the result.

    Tiles count backwards: the long rows of a causal sequence come first.
    """
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    s, k_start, index, real, seen = locate(tiles, seqs, q_pos, tile, 0, kv_head, Hq, GROUP, BM)
    most = tl.max(seen)
    least = tl.min(tl.where(real, seen, most))
    nodes += (tile * tl.num_programs(1) + kv_head).to(tl.int64) * slots * (BM * (BD + 2))
    k, v, pages, rows = k + kv_head * k_head, v + kv_head * v_head, table + s * table_stride, tl.arange(0, BM)
    leaves = tl.cdiv(most, LEAF)
    begin, end = 0, leaves
    if SPLIT:
        begin = tl.program_id(2)
        end = tl.minimum(begin + 1, leaves)
    if begin < end:
        query = load_rows(q, index, real, D, BD)
        for leaf in range(begin, end):
            m, l, o = forward_leaf(
                query, k, k_stride, v, v_stride, pages, k_start, leaf * LEAF, most, least, seen, scale, D, BD, LEAF, BN, PAGE, ONE_PAGE,
                ONLINE, NARROW,
            )  # fmt: skip
            if SPLIT:
                store_node(m, l, o, nodes, slots, leaf, rows, real, BM, BD)
            else:
                last = leaf == leaves - 1
                m, l, o, level = merge_nodes(m, l, o, nodes, slots, leaf, last, rows, real, BM, BD, False)
                if last:
                    store_result(m, l, o, out, m_out, l_out, index, real, D, BD)
                else:
                    store_node(m, l, o, nodes, slots, level, rows, real, BM, BD)


@triton.jit
def merge_kernel(
    seqs, q_pos, tiles, Hq, nodes, slots, out, m_out, l_out,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, LEAF: tl.constexpr, NODE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The nodes of the split schedule, BM of a tile's NODE row-heads. Grid (tiles, kv heads, NODE / BM)."""
    tile, kv_head, offset = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BM
    s, k_start, index, real, seen = locate(tiles, seqs, q_pos, tile, offset, kv_head, Hq, GROUP, BM)
    nodes += (tile * tl.num_programs(1) + kv_head).to(tl.int64) * slots * (NODE * (BD + 2))
    rows = offset + tl.arange(0, BM)
    leaves = tl.cdiv(tl.max(seen), LEAF)
    for leaf in range(leaves):
        at_m, at_l, at_o = node_pointers(nodes, slots, leaf, rows, NODE, BD)
        m, l = tl.load(at_m, mask=real, other=ABSENT), tl.load(at_l, mask=real, other=0.0)
        o = tl.load(at_o, mask=real[:, None], other=0.0)
        last = leaf == leaves - 1
        m, l, o, level = merge_nodes(m, l, o, nodes, slots, leaf, last, rows, real, NODE, BD, True)
        if last:
            store_result(m, l, o, out, m_out, l_out, index, real, D, BD)
        elif level > 0:
            store_node(m, l, o, nodes, slots, leaf - (1 << level) + 1, rows, real, NODE, BD)


def blocks(dtype: torch.dtype, rows: int, head_dim: int, leaf: int, split: bool) -> tuple[dict, dict]:
    """(constants, launch options) of forward_kernel. In bf16, BN and 16 rows per warp (one MMA shape) are the same for every schedule."""
    narrow = dtype == torch.bfloat16
    bn = min(64 if narrow else 32, max(16, triton.next_power_of_2(leaf)))
    if narrow:
        bm, warps = (64, 4) if split else (128, 8)
    else:
        bm, warps = (32, 8) if not split and rows > 16 else (16, 4)
    constants = {"D": head_dim, "BD": max(16, triton.next_power_of_2(head_dim)), "LEAF": leaf, "BM": bm, "BN": bn}
    return constants | {"ONLINE": narrow or leaf <= bn, "NARROW": narrow, "SPLIT": split}, {"num_warps": warps, "num_stages": 2}


def pages_of(block_table: Tensor | None, page_size: int, seqs: Tensor, leaf: int, block: int) -> tuple[Tensor, int, dict]:
    """Block table (anything, if there is none), its row stride and the constants of load_keys."""
    if block_table is None:
        return seqs, 0, {"PAGE": 0, "ONE_PAGE": False}
    return block_table, block_table.stride(0), {"PAGE": page_size, "ONE_PAGE": page_size % block == 0 and leaf % block == 0}


def forward(
    q: Tensor, k: Tensor, v: Tensor, seqs: Tensor, q_pos: Tensor, scale: float, kv_leaf: int,
    block_table: Tensor | None = None, page_size: int = 0, max_len: int | None = None, split: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As kernels.attention.forward, keys contiguous or in pages.

    max_len: bound of the sequences' k_len. With it nothing is read from the device, so a call can be captured in a CUDA graph; without it
    the split schedule waits for `seqs`. split: choose the schedule (default: for at most 64 row-heads a sequence). No bit depends on
    either.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    stats = torch.zeros((2, *q.shape[:2]), dtype=torch.float32, device=q.device)
    if q.numel() == 0 or len(seqs) == 0:
        return out, stats[0], stats[1]
    q, seqs = q.contiguous(), seqs.contiguous()
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    rows = q.shape[0] * group
    if split is None:
        split = rows <= 64 * len(seqs)
    if max_len is None:
        max_len = int(seqs[:, 3].max()) if split else (k.shape[0] if block_table is None else block_table.shape[1] * page_size)
    constants, options = blocks(q.dtype, rows, q.shape[2], kv_leaf, split)
    tiles = query_tiles(seqs, q.shape[0], group, constants["BM"])
    leaves = max(1, triton.cdiv(max_len, kv_leaf))
    slots = leaves if split else leaves.bit_length()
    shape = (len(tiles) * kv_heads * slots, constants["BM"], constants["BD"] + 2)
    nodes = torch.empty(shape, dtype=torch.float32, device=q.device)
    table, table_stride, paging = pages_of(block_table, page_size, seqs, kv_leaf, constants["BN"])
    result = nodes, slots, out, stats[0], stats[1]
    forward_kernel[(len(tiles), kv_heads, leaves if split else 1)](
        q, k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1), table, table_stride, seqs, q_pos, tiles, q.shape[1], float(scale),
        *result,
        GROUP=group, **constants, **paging, **options, **math.LAUNCH,
    )  # fmt: skip
    if split:
        size = {name: constants[name] for name in ("D", "BD", "LEAF")} | {"NODE": constants["BM"], "BM": 16, "GROUP": group}
        merge_kernel[(len(tiles), kv_heads, constants["BM"] // 16)](
            seqs, q_pos, tiles, q.shape[1], *result, **size, num_warps=4, **math.LAUNCH
        )
    return out, stats[0], stats[1]


def cases_of(kind: str, dtype: torch.dtype) -> list:
    from kernels.gpu.ahead_of_time import Case

    cases = []
    for name, split, table in (("prefill", False, "*i64"), ("decode", True, "*i64"), ("decode paged", True, "*i32")):
        constants, options = blocks(dtype, 4096, 128, 128, split)
        constants |= {"GROUP": 2, "PAGE": 16 if "paged" in name else 0, "ONE_PAGE": False}
        signature = {
            "q": f"*{kind}", "k": f"*{kind}", "k_stride": "i32", "k_head": "i32", "v": f"*{kind}", "v_stride": "i32", "v_head": "i32",
            "table": table, "table_stride": "i32", "seqs": "*i64", "q_pos": "*i64", "tiles": "*i64", "Hq": "i32", "scale": "fp32",
            "nodes": "*fp32", "slots": "i32", "out": f"*{kind}", "m_out": "*fp32", "l_out": "*fp32",
        }  # fmt: skip
        aligned = (
            "q",
            "k",
            "k_stride",
            "k_head",
            "v",
            "v_stride",
            "v_head",
            "table",
            "seqs",
            "q_pos",
            "tiles",
            "nodes",
            "out",
            "m_out",
            "l_out",
        )
        # In bf16 some registers spill (36 stores in prefill, 9 in decoding, on sm_90): only a GPU can tell whether another tile is faster.
        own = {"main": kind == "fp32", "approximate": kind == "bf16"}
        cases.append(Case(forward_kernel, f"{kind} {name}", signature, constants, aligned, options, **own))
    signature = {"seqs": "*i64", "q_pos": "*i64", "tiles": "*i64", "Hq": "i32", "nodes": "*fp32", "slots": "i32", "out": f"*{kind}"}
    signature |= {"m_out": "*fp32", "l_out": "*fp32"}
    constants = {"GROUP": 2, "D": 128, "BD": 128, "LEAF": 128, "NODE": 64, "BM": 16}
    aligned = ("seqs", "q_pos", "tiles", "nodes", "out", "m_out", "l_out")
    return [*cases, Case(merge_kernel, f"{kind} merge", signature, constants, aligned, {"num_warps": 4})]

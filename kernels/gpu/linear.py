"""Linear layers: the halving tree over leaves in two schedules, and exact weight gradients.

The tree over n leaves, 2^d <= n < 2^(d+1), is a perfect tree over 2^d groups of one or two leaves, because a node always gives its left
child half, rounded down. Walking through the leaves in order, levels behave like the digits of a binary counter. `product_kernel` keeps
the left leaf of a pair and the lowest one or two digits in registers, higher ones in a small workspace that stays in L2; with more
rows of the grid it is the decode schedule: each program computes one node, and `finish_kernel` adds the rest of the tree.

The weight is always the M side of a matrix instruction and tokens its N side, so that one token and a thousand run the same wgmma
(M = 64, K = 16); the K block follows from the leaf alone. In fp32, padding multiplies
+0 with -0: adding -0 changes nothing, not even -0.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import math

_PROGRAMS = 264  # two on each of an H200's 132 multiprocessors
_MAX_SPLITS = 64


@triton.jit
def group_bounds(group, n, D: tl.constexpr):
    """First leaf and number of leaves (1 or 2) of a node at depth D of the halving tree over n leaves."""
    lo, size = group * 0, group * 0 + n
    for t in tl.static_range(D):
        half, right = size // 2, (group >> (D - 1 - t)) & 1
        lo += right * half
        size = tl.where(right == 1, size - half, half)
    return lo, size


@triton.jit
def product_kernel(
    x_ptr, w_ptr, y_ptr, stack_ptr, m, n, k, leaf, x_stride, w_stride_n, w_stride_k, tiles_m, tiles_n, y_stride_split,
    D: tl.constexpr, SPLIT: tl.constexpr, PAIRS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    MID: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """y [2^SPLIT, m, n]: nodes at depth SPLIT of the halving tree (depth D, groups of one or two leaves) of x [m,k] @ w [n,k].T."""
    LEVELS: tl.constexpr = D - SPLIT
    split = tl.program_id(1)
    leaves = (k + leaf - 1) // leaf
    first_group = split << LEVELS
    first, _ = group_bounds(first_group, leaves, D)
    _, size = group_bounds(split, leaves, SPLIT)
    blocks = (leaf + BK - 1) // BK
    stack_ptr += (tl.program_id(0) * tl.num_programs(1) + split) * (LEVELS * BM * BN)
    slot = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        band = tile // (GROUP * tiles_m)  # programs that run together share few rows of w and all of x: both come from L2
        height = tl.minimum(tiles_n - band * GROUP, GROUP)
        inside = tile - band * GROUP * tiles_m
        rn = (band * GROUP + inside % height) * BN + tl.arange(0, BN)
        rm = (inside // height) * BM + tl.arange(0, BM)
        x_row, w_row = x_ptr + rm.to(tl.int64) * x_stride, w_ptr + rn.to(tl.int64) * w_stride_n
        acc = tl.zeros((BN, BM), tl.float32)
        pair, low, mid = acc, acc, acc
        group, in_group, members = first_group, 0, 1
        if PAIRS:
            members = group_bounds(group, leaves, D)[1]
        # The thread that loads an element of the stack need not be the one that stored it, but it does so in a later iteration, and every
        # iteration has barriers, around the operands in shared memory. (An explicit one would keep Triton from pipelining the loop.)
        for step in range(size * blocks):
            leaf_index, block = first + step // blocks, step % blocks
            end = tl.minimum((leaf_index + 1) * leaf, k)
            rk = leaf_index * leaf + block * BK + tl.arange(0, BK)
            x = tl.load(x_row[None, :] + rk[:, None], mask=(rk[:, None] < end) & (rm[None, :] < m), other=0.0)
            w = tl.load(w_row[:, None] + rk[None, :].to(tl.int64) * w_stride_k, mask=(rk[None, :] < end) & (rn[:, None] < n), other=0.0)
            if TAIL:  # asynchronous copies pad with +0 whatever `other` says
                w = tl.where(rk[None, :] < end, w, -0.0)
            acc = math.dot(w, x, acc)
            if block == blocks - 1:
                value = acc
                acc = tl.zeros((BN, BM), tl.float32)
                whole = True
                if PAIRS:
                    value = tl.where(in_group == 1, pair + value, value)
                    pair = value
                    in_group += 1
                    whole = in_group == members
                if whole:
                    in_group = 0
                    digits = group - first_group
                    if LEVELS > 0:  # noqa: SIM102 - decided when compiling
                        if digits & 1 == 1:
                            value = low + value
                            digits = digits >> 1
                            level = 1
                            if MID:
                                if digits & 1 == 0:
                                    mid = value
                                else:
                                    value = mid + value
                                    digits = digits >> 1
                                    level = 2
                            if level > (1 if MID else 0):
                                while digits & 1 == 1:
                                    value = tl.load(stack_ptr + level * (BM * BN) + slot) + value
                                    digits = digits >> 1
                                    level += 1
                                if level < LEVELS:
                                    tl.store(stack_ptr + level * (BM * BN) + slot, value)
                    low = value  # free after an odd digit, so that the root ends up here
                    group += 1
                    if PAIRS:
                        members = group_bounds(group, leaves, D)[1]
        y = y_ptr + split.to(tl.int64) * y_stride_split + rm.to(tl.int64)[None, :] * n + rn[:, None]
        tl.store(y, math.stored(low, y_ptr.dtype.element_ty), mask=(rm[None, :] < m) & (rn[:, None] < n))


@triton.jit
def finish_kernel(parts_ptr, y_ptr, count, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """y [count] = the halving tree over parts [2^SPLIT, count]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    parts = tl.arange(0, 1 << SPLIT).to(tl.int64)
    v = tl.load(parts_ptr + i[:, None] + parts[None, :] * count, mask=(i < count)[:, None], other=0.0)
    for t in tl.static_range(SPLIT):
        left, right = tl.split(tl.reshape(v, (BLOCK, 1 << (SPLIT - 1 - t), 2)))
        v = left + right
    tl.store(y_ptr + i, math.stored(tl.reshape(v, (BLOCK,)), y_ptr.dtype.element_ty), mask=i < count)


@triton.jit
def weight_grad_kernel(
    acc_ptr, dy_ptr, x_ptr, steps_ptr, bad_ptr, num_steps, n, k, dy_stride, x_stride, scale_log2, tiles_n,
    BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """acc [n,k] += sum over leaves of fixed(dy.T @ x). steps [num_steps,3]: first row, end of its leaf, whether the leaf ends here."""
    rn = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    rk = (tl.program_id(0) // tiles_n) * BK + tl.arange(0, BK)
    limit = ((tl.full((BN, BK), 1023 + 61, tl.int64) - scale_log2) << 52).to(tl.float64, bitcast=True)  # 2^(61 - scale)
    v = tl.zeros((BN, BK), tl.float32)
    total, bad = tl.zeros((BN, BK), tl.int64), tl.zeros((BN, BK), tl.int32)
    for s in range(num_steps):
        begin, end, last = tl.load(steps_ptr + 3 * s), tl.load(steps_ptr + 3 * s + 1), tl.load(steps_ptr + 3 * s + 2)
        r = begin + tl.arange(0, BR)
        row = r.to(tl.int64)
        dy = tl.load(dy_ptr + row[None, :] * dy_stride + rn[:, None], mask=(r[None, :] < end) & (rn[:, None] < n), other=0.0)
        x = tl.load(x_ptr + row[:, None] * x_stride + rk[None, :], mask=(r[:, None] < end) & (rk[None, :] < k), other=0.0)
        v = math.dot(dy, x, v)
        if last == 1:
            fits = tl.abs(v).to(tl.float64) < limit  # false for NaN
            total += tl.where(fits, math.fixed(tl.where(fits, v, 0.0), scale_log2), 0)
            bad |= tl.where(fits & (math.sum_fits(total)), 0, 1)
            v = tl.zeros((BN, BK), tl.float32)
    mask = (rn[:, None] < n) & (rk[None, :] < k)
    target = acc_ptr + rn.to(tl.int64)[:, None] * k + rk[None, :]
    total += tl.load(target, mask=mask, other=0)
    tl.store(target, total, mask=mask)
    bad = tl.where(mask, bad | tl.where(math.sum_fits(total), 0, 1), 0)
    if tl.max(tl.max(bad, 1), 0) != 0:
        tl.store(bad_ptr, 1)


# --- launches ----------------------------------------------------------------------------------------------------------------
def forward(x: Tensor, w: Tensor, leaf: int, dtype: torch.dtype | None = None) -> Tensor:
    """x [M,K] @ w[N,K].T -> [M,N]; see `kernels.linear.forward`."""
    return _product(x, w, len(w), w.stride(0), 1, leaf, dtype)


def input_grad(dy: Tensor, w: Tensor, leaf: int, dtype: torch.dtype | None = None) -> Tensor:
    """dy [M,N] @ w [N,K] -> [M,K]; see `kernels.linear.input_grad`."""
    return _product(dy, w, w.shape[1], 1, w.stride(0), leaf, dtype)


def accumulate_weight_grad(acc: Tensor, dy: Tensor, x: Tensor, tiles: Tensor, scale_log2: int) -> None:
    """acc [N,K] += fixed(dy.T @ x) leaf by leaf; see `kernels.linear.accumulate_weight_grad`. Reads one flag back, so it waits for the GPU,
    unless a CUDA graph is being captured: then nothing is checked."""
    n, k = acc.shape
    block = 64
    steps = _steps(tuple(tiles.tolist()), block, acc.device)
    if not len(steps) or not acc.numel():
        return
    bn, bk = (16, 16) if math.INTERPRETED.value else (128, 64)
    bad = torch.zeros(1, dtype=torch.int32, device=acc.device)
    tiles_n = triton.cdiv(n, bn)
    weight_grad_kernel[(tiles_n * triton.cdiv(k, bk),)](
        acc, dy, x, steps, bad, len(steps), n, k, dy.stride(0), x.stride(0), scale_log2, tiles_n,
        BN=bn, BK=bk, BR=16 if math.INTERPRETED.value else block, num_warps=8, num_stages=3, **math.LAUNCH,
    )  # fmt: skip
    if math.may_read_back(acc) and int(bad):
        raise OverflowError(f"a weight gradient left the range of int64 at scale 2^{scale_log2}")


@functools.lru_cache(maxsize=32)
def _steps(bounds: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    """int32 [S,3]: the row blocks of all leaves: first row, end of the leaf, 1 in the last block of a leaf. A layer's linears share it."""
    block = 16 if math.INTERPRETED.value else block
    rows = [(r, b, int(r + block >= b)) for a, b in zip(bounds, bounds[1:]) for r in range(a, b, block)]
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 3).to(device)


def k_block(leaf: int, itemsize: int) -> int:
    """Terms per load: nothing else may decide it, as the tensor cores see these blocks. 16 to 64 (32 in fp32: no matrix instructions)."""
    return max(16, min(triton.next_power_of_2(leaf), 64 if itemsize == 2 else 32))


@functools.cache
def plan(m: int, n: int, k: int, leaf: int, itemsize: int, interpreted: bool) -> tuple[int, int, int, int, int, int, bool]:
    """BM, BN, warps, stages, D, SPLIT, PAIRS. Only k and leaf enter the tree; the rest may change no bit."""
    leaves = -(-k // leaf)
    depth = leaves.bit_length() - 1
    if interpreted:
        bm, bn, warps, stages = 16, 16, 4, 1
    elif m > 64:
        bm, bn, warps, stages = (128 if itemsize == 2 and leaves == 1 << depth else 64), 128, 8, 3
    else:
        bm = max(16, triton.next_power_of_2(m))
        bn, warps, stages = 64, 8 if itemsize == 4 and bm >= 32 else 4, 4
    tiles = -(-m // bm) * -(-n // bn)
    split = 0
    while split < depth and (tiles << split) < _PROGRAMS and (1 << split) < _MAX_SPLITS and (m <= 64 or tiles << split < 66):
        split += 1
    return bm, bn, warps, stages, depth, split, leaves != 1 << depth


def constants(bm: int, k: int, leaf: int, pairs: bool, itemsize: int) -> dict[str, object]:
    """BK; MID: whether a second digit has room in registers; TAIL: whether an fp32 leaf ends inside a block."""
    bk = k_block(leaf, itemsize)
    tail = itemsize == 4 and (leaf % bk != 0 or k % leaf % bk != 0)
    return {"BK": bk, "MID": bm <= 64 and not (pairs and itemsize == 4), "TAIL": tail}


def _product(x: Tensor, w: Tensor, n: int, stride_n: int, stride_k: int, leaf: int, dtype: torch.dtype | None, split: int | None = None):
    m, k = x.shape
    y = torch.empty((m, n), dtype=dtype or x.dtype, device=x.device)
    if not y.numel() or not k:
        return y.zero_()
    bm, bn, warps, stages, depth, automatic, pairs = plan(m, n, k, leaf, x.element_size(), math.INTERPRETED.value)
    split = automatic if split is None else min(split, depth)
    tiles_m, tiles_n = triton.cdiv(m, bm), triton.cdiv(n, bn)
    programs = min(tiles_m * tiles_n, _PROGRAMS)
    stack = torch.empty((programs << split) * (depth - split) * bm * bn, dtype=torch.float32, device=x.device)
    parts = torch.empty((1 << split, m, n), dtype=torch.float32, device=x.device) if split else y
    product_kernel[(programs, 1 << split)](
        x, w, parts, stack, m, n, k, leaf, x.stride(0), stride_n, stride_k, tiles_m, tiles_n, m * n, D=depth, SPLIT=split, PAIRS=pairs,
        BM=bm, BN=bn, GROUP=8, **constants(bm, k, leaf, pairs, x.element_size()), num_warps=warps, num_stages=stages, **math.LAUNCH,
    )  # fmt: skip
    if split:
        finish_kernel[(triton.cdiv(m * n, 128),)](parts, y, m * n, SPLIT=split, BLOCK=128, num_warps=4, **math.LAUNCH)
    return y


def compile_cases() -> list:
    """Qwen3-0.6B shapes, both schedules, both types."""
    from kernels.gpu.ahead_of_time import Case

    cases = []
    for kind, itemsize in (("fp32", 4), ("bf16", 2)):
        for name, m, n, k in (
            ("prefill", 4096, 3072, 1024),
            ("decode", 4, 3072, 1024),
            ("down", 4096, 1024, 3072),
            ("decode64", 64, 1024, 3072),
        ):
            bm, bn, warps, stages, depth, split, pairs = plan(m, n, k, 128, itemsize, False)
            for side in ("forward", "input_grad"):
                pointers = {"x_ptr": f"*{kind}", "w_ptr": f"*{kind}", "y_ptr": "*fp32" if split else f"*{kind}", "stack_ptr": "*fp32"}
                unit, free = ("w_stride_k", "w_stride_n") if side == "forward" else ("w_stride_n", "w_stride_k")
                numbers = dict.fromkeys(("m", "n", "k", "leaf", "x_stride", free, "tiles_m", "tiles_n", "y_stride_split"), "i32")
                constexprs = {"D": depth, "SPLIT": split, "PAIRS": pairs, "BM": bm, "BN": bn, "GROUP": 8, unit: 1}
                constexprs |= constants(bm, k, 128, pairs, itemsize)
                aligned = (*pointers, "m", "n", "k", "leaf", "x_stride", free, "y_stride_split")
                options = {"num_warps": warps, "num_stages": stages}
                cases.append(Case(product_kernel, f"{kind} {side} {name}", {**pointers, **numbers}, constexprs, aligned, options))
        pointers = {"acc_ptr": "*i64", "dy_ptr": f"*{kind}", "x_ptr": f"*{kind}", "steps_ptr": "*i32", "bad_ptr": "*i32"}
        numbers = dict.fromkeys(("num_steps", "n", "k", "dy_stride", "x_stride", "scale_log2", "tiles_n"), "i32")
        aligned = (*pointers, "n", "k", "dy_stride", "x_stride")
        constexprs = {"BN": 128, "BK": 64, "BR": 64}
        options = {"num_warps": 8, "num_stages": 3}
        cases.append(Case(weight_grad_kernel, f"{kind} weight grad", {**pointers, **numbers}, constexprs, aligned, options))
        signature = {"parts_ptr": "*fp32", "y_ptr": f"*{kind}", "count": "i32"}
        cases.append(Case(finish_kernel, f"{kind} finish", signature, {"SPLIT": 3, "BLOCK": 128}, ("parts_ptr", "y_ptr", "count")))
    return cases

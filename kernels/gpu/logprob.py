"""The fused head: statistics of vocabulary leaves, their merge, and the gradient of their logits; see `kernels.logprob`.

Logits exist for a few leaves at a time (`_BUDGET` bytes, one leaf at least): a block of leaves is one product, one launch for the
statistics of all its leaves, and a few for the tree. With bf16 operands the gradient of the logits is bf16, too, so that the two
products that use it run on tensor cores.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reduce
from kernels.gpu import linear, math
from kernels.gpu.rms_norm import lane_sum

_BUDGET = 1 << 26
_BLOCK = 1024


@triton.jit
def leaf_kernel(
    logits_ptr, targets_ptr, stats_ptr, target_ptr, scalars_ptr, rows, columns, leaf, first_id, stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """stats [leaves, rows, 3] of leaf program_id(1) for ROWS rows; y of the targets that lie in it."""
    r, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    mask = r < rows
    factor = tl.load(scalars_ptr)
    begin = i * leaf
    size = tl.minimum(columns - begin, leaf)
    row = logits_ptr + r.to(tl.int64)[:, None] * stride + begin
    most = tl.full((ROWS,), -3.4028234663852886e38, tl.float32)
    for c in range(0, size, BLOCK):
        column = c + tl.arange(0, BLOCK)
        y = tl.load(row + column[None, :], mask=mask[:, None] & (column < size)[None, :], other=float("-inf")) * factor
        most = tl.maximum(most, tl.max(y, 1))
    s, t = tl.zeros((ROWS, 16), tl.float32), tl.zeros((ROWS, 16), tl.float32)
    for c in range(0, size, 16):
        column = c + tl.arange(0, 16)
        y = tl.load(row + column[None, :], mask=mask[:, None] & (column < size)[None, :], other=float("-inf")) * factor
        d = y - most[:, None]
        d = tl.where(d < -128.0, -128.0, d)
        e = math.exp(d)
        s = s + e
        t = math.fma(e, d, t)
    out = stats_ptr + (i.to(tl.int64) * rows + r) * 3
    tl.store(out, most, mask=mask)
    tl.store(out + 1, lane_sum(s, ROWS), mask=mask)
    tl.store(out + 2, lane_sum(t, ROWS), mask=mask)
    local = tl.load(targets_ptr + r, mask=mask, other=0) - first_id - begin
    owned = mask & (local >= 0) & (local < size)
    value = tl.load(logits_ptr + r.to(tl.int64) * stride + begin + tl.where(owned, local, 0), mask=owned, other=0.0)
    tl.store(target_ptr + r, value * factor, mask=owned)


@triton.jit
def merge_kernel(a_ptr, b_ptr, out_ptr, count, BLOCK: tl.constexpr):
    i = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)) * 3
    mask = i < count * 3
    ma, mb = tl.load(a_ptr + i, mask=mask, other=0.0), tl.load(b_ptr + i, mask=mask, other=0.0)
    sa, sb = tl.load(a_ptr + i + 1, mask=mask, other=0.0), tl.load(b_ptr + i + 1, mask=mask, other=0.0)
    ta, tb = tl.load(a_ptr + i + 2, mask=mask, other=0.0), tl.load(b_ptr + i + 2, mask=mask, other=0.0)
    m = tl.where(ma < mb, mb, ma)
    da, db = ma - m, mb - m
    ea, eb = math.exp(da), math.exp(db)
    tl.store(out_ptr + i, m, mask=mask)
    tl.store(out_ptr + i + 1, sa * ea + sb * eb, mask=mask)
    tl.store(out_ptr + i + 2, (ta + sa * da) * ea + (tb + sb * db) * eb, mask=mask)


@triton.jit
def finish_kernel(stats_ptr, target_ptr, out_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    m, s = tl.load(stats_ptr + 3 * i, mask=mask, other=0.0), tl.load(stats_ptr + 3 * i + 1, mask=mask, other=1.0)
    t, y = tl.load(stats_ptr + 3 * i + 2, mask=mask, other=0.0), tl.load(target_ptr + i, mask=mask, other=0.0)
    log_s = math.log(s)
    tl.store(out_ptr + i, (y - m) - log_s, mask=mask)
    tl.store(out_ptr + count + i, log_s - math.div(t, s), mask=mask)
    tl.store(out_ptr + 2 * count + i, m + log_s, mask=mask)


@triton.jit
def gradient_kernel(
    logits_ptr, out_ptr, targets_ptr, lse_ptr, entropy_ptr, g_logprob_ptr, g_entropy_ptr, scalars_ptr, columns, first_id,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one row's logits."""
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < columns
    factor = tl.load(scalars_ptr)
    logits = tl.load(logits_ptr + r * columns + i, mask=mask, other=0.0)
    d = logits * factor - tl.load(lse_ptr + r)
    d = tl.where(d < -128.0, -128.0, d)
    p = math.exp(d)
    hit = tl.where(i == tl.load(targets_ptr + r) - first_id, 1.0, 0.0)
    policy = tl.load(g_logprob_ptr + r) * (hit - p)
    gradient = factor * (policy - tl.load(g_entropy_ptr + r) * (p * (d + tl.load(entropy_ptr + r))))
    tl.store(out_ptr + r * columns + i, math.stored(gradient, out_ptr.dtype.element_ty), mask=mask)


# --- forward -----------------------------------------------------------------------------------------------------------------
def partials(
    h: Tensor, w_local: Tensor, targets: Tensor, inv_temp: float, k_leaf: int, vocab_leaf: int, first_id: int, nodes: Sequence[reduce.Node]
) -> tuple[Tensor, Tensor]:
    """Statistics [len(nodes), M, 3] and y of the targets [M]."""
    leaves = -(-len(w_local) // vocab_leaf)
    own = torch.empty((leaves, len(h), 3), dtype=torch.float32, device=h.device)
    target = torch.zeros(len(h), dtype=torch.float32, device=h.device)
    step = _leaves_at_once(len(h), vocab_leaf)
    for i in range(0, leaves, step):
        a, b = i * vocab_leaf, min((i + step) * vocab_leaf, len(w_local))
        logits = linear.forward(h, w_local[a:b], k_leaf, torch.float32)
        _statistics(logits, targets, inv_temp, vocab_leaf, first_id + a, own[i:], target)
    return _roots(own, nodes, first_id // vocab_leaf), target


def partials_from_logits(
    logits: Tensor, targets: Tensor, inv_temp: float, vocab_leaf: int, first_id: int, nodes: Sequence[reduce.Node]
) -> tuple[Tensor, Tensor]:
    """The same from logits that exist: one launch for all leaves, a few for the tree."""
    leaves = -(-logits.shape[1] // vocab_leaf)
    own = torch.empty((leaves, len(logits), 3), dtype=torch.float32, device=logits.device)
    target = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    _statistics(logits, targets, inv_temp, vocab_leaf, first_id, own, target)
    return _roots(own, nodes, first_id // vocab_leaf), target


def _statistics(logits: Tensor, targets: Tensor, inv_temp: float, leaf: int, first_id: int, stats: Tensor, target: Tensor) -> None:
    rows, columns = logits.shape
    if not logits.numel():
        return
    block = 1 if rows < 8 else 8
    leaf_kernel[(triton.cdiv(rows, block), triton.cdiv(columns, leaf))](
        logits, targets.contiguous(), stats, target, _scalar(inv_temp, logits.device), rows, columns, leaf, first_id, logits.stride(0),
        ROWS=block, BLOCK=256, num_warps=4, **math.LAUNCH,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _scalar(value: float, device: torch.device) -> Tensor:
    """One fp32 number in the device's memory: rounded once, and no copy while a graph is recorded."""
    return torch.tensor([value], dtype=torch.float32).to(device)


def _leaves_at_once(rows: int, leaf: int) -> int:
    return max(1, _BUDGET // (4 * max(rows, 1) * leaf))


def _roots(leaves: Tensor, nodes: Sequence[reduce.Node], first: int) -> Tensor:
    if not nodes:
        return leaves.new_empty((0, *leaves.shape[1:]))
    return torch.stack([_root(leaves[lo - first : hi - first]) for lo, hi in nodes])


def _root(leaves: Tensor) -> Tensor:
    """The halving tree over dim 0, level by level: 2^d <= n < 2^(d+1) leaves are a perfect tree over groups of one or two."""
    firsts, pairs = _groups(len(leaves), leaves.device)
    level = leaves if firsts is None else leaves[firsts]
    if pairs is not None:
        groups, lefts = pairs
        level[groups] = merge(leaves[lefts], leaves[lefts + 1])
    while len(level) > 1:
        level = merge(level[0::2], level[1::2])
    return level[0]


@functools.lru_cache(maxsize=64)
def _groups(n: int, device: torch.device) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
    """First leaf of each group; (group, first leaf) of the groups of two. None where n is a power of two: every leaf is a group."""
    if n & (n - 1) == 0:
        return None, None
    bounds = [(0, n)]
    while len(bounds) * 2 <= n:
        bounds = [half for lo, hi in bounds for half in ((lo, (lo + hi) // 2), ((lo + hi) // 2, hi))]
    two = [i for i, (lo, hi) in enumerate(bounds) if hi - lo == 2]
    firsts = torch.tensor([lo for lo, _ in bounds], device=device)
    return firsts, (torch.tensor(two, device=device), firsts[two])


def merge(a: Tensor, b: Tensor) -> Tensor:
    """Statistics [..., 3] of a node from those of its halves."""
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    if count := a.numel() // 3:
        merge_kernel[(triton.cdiv(count, 256),)](a, b, out, count, BLOCK=256, **math.LAUNCH)
    return out


def finish(stats: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logprob, entropy, lse [M]."""
    out = torch.empty((3, len(target)), dtype=torch.float32, device=target.device)
    if len(target):
        finish_kernel[(triton.cdiv(len(target), 256),)](stats.contiguous(), target.contiguous(), out, len(target), BLOCK=256, **math.LAUNCH)
    return out[0], out[1], out[2]


# --- backward ----------------------------------------------------------------------------------------------------------------
def backward(
    h: Tensor, w_local: Tensor, targets: Tensor, lse: Tensor, entropy: Tensor, g_logprob: Tensor, g_entropy: Tensor, inv_temp: float,
    k_leaf: int, vocab_leaf: int, first_id: int, nodes: Sequence[reduce.Node], acc: Tensor | None, tiles: Tensor, scale_log2: int,
) -> Tensor:  # fmt: skip
    """dh [len(nodes), M, H]; acc int64 [V_local, H] += dw."""
    rows = [t.contiguous() for t in (targets, lse, entropy, g_logprob, g_entropy)]
    first, at_once = first_id // vocab_leaf, _leaves_at_once(len(h), vocab_leaf)

    def node(lo: int, hi: int) -> Tensor:
        """A subtree of few enough leaves is one product, whose own tree over leaves is that subtree."""
        if hi - lo > at_once:
            mid = (lo + hi) // 2
            left = node(lo, mid)
            return left + node(mid, hi)
        a, b = (lo - first) * vocab_leaf, min((hi - first) * vocab_leaf, len(w_local))
        w = w_local[a:b]
        gradient = _gradient(linear.forward(h, w, k_leaf, torch.float32), h.dtype, rows, inv_temp, first_id + a)
        if acc is not None:
            linear.accumulate_weight_grad(acc[a:b], gradient, h, tiles, scale_log2)
        return linear.input_grad(gradient, w, vocab_leaf, torch.float32)

    dh = torch.empty((len(nodes), *h.shape), dtype=torch.float32, device=h.device)
    for out, (lo, hi) in zip(dh, nodes, strict=True):
        out.copy_(node(lo, hi))
    return dh


def _gradient(logits: Tensor, dtype: torch.dtype, rows: list[Tensor], inv_temp: float, first_id: int) -> Tensor:
    """In place where the dtype allows it."""
    out = logits if dtype is torch.float32 else torch.empty(logits.shape, dtype=dtype, device=logits.device)
    if logits.numel():
        gradient_kernel[(len(logits), triton.cdiv(logits.shape[1], _BLOCK))](
            logits, out, *rows, _scalar(inv_temp, logits.device), logits.shape[1], first_id, BLOCK=_BLOCK, **math.LAUNCH
        )
    return out


def compile_cases() -> list:
    from kernels.gpu.ahead_of_time import Case

    pointers = {"logits_ptr": "*fp32", "targets_ptr": "*i64", "stats_ptr": "*fp32", "target_ptr": "*fp32", "scalars_ptr": "*fp32"}
    signature = pointers | dict.fromkeys(("rows", "columns", "leaf", "first_id", "stride"), "i32")
    cases = [Case(leaf_kernel, f"{n} rows", signature, {"ROWS": n, "BLOCK": 256}, (*pointers, "stride")) for n in (1, 8)]
    merged = {"a_ptr": "*fp32", "b_ptr": "*fp32", "out_ptr": "*fp32", "count": "i32"}
    cases.append(Case(merge_kernel, "flat", merged, {"BLOCK": 256}, ("a_ptr", "b_ptr", "out_ptr")))
    finished = {"stats_ptr": "*fp32", "target_ptr": "*fp32", "out_ptr": "*fp32", "count": "i32"}
    cases.append(Case(finish_kernel, "flat", finished, {"BLOCK": 256}, ("stats_ptr", "target_ptr", "out_ptr")))
    for kind in ("fp32", "bf16"):
        pointers = {"logits_ptr": "*fp32", "out_ptr": f"*{kind}", "targets_ptr": "*i64"}
        pointers |= dict.fromkeys(("lse_ptr", "entropy_ptr", "g_logprob_ptr", "g_entropy_ptr", "scalars_ptr"), "*fp32")
        signature = pointers | {"columns": "i32", "first_id": "i32"}
        cases.append(Case(gradient_kernel, kind, signature, {"BLOCK": _BLOCK}, (*pointers, "columns")))
    return cases

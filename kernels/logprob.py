"""Log-probability and entropy of softmax(h @ w^T * inv_temp), fused with the head: only one vocabulary leaf of logits exists at a time.

With y = logit * inv_temp, a vocabulary leaf gives three statistics: m = max y, s = sum exp(y - m), t = sum exp(y - m) * (y - m).
Sums run over 16 lanes (see rms_norm). Statistics of leaves are merged on the halving tree over the whole vocabulary:

    m = max(ma, mb), ea = exp(ma - m), eb = exp(mb - m)
    s = sa * ea + sb * eb
    t = (ta + sa * (ma - m)) * ea + (tb + sb * (mb - m)) * eb

Ranks own whole vocabulary leaves. A rank's `nodes` are its maximal tree nodes (lo, hi), in global leaf numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels import device, linear, reduce
from kernels.cpu import build

_FLOATS = (torch.float32, torch.bfloat16)


def partials(
    h: Tensor, w_local: Tensor, targets: Tensor, inv_temp: float, k_leaf: int, vocab_leaf: int, first_id: int, nodes: Sequence[reduce.Node]
) -> tuple[Tensor, Tensor]:
    """Statistics fp32 [len(nodes), M, 3] = (m, s, t) and y of the targets fp32 [M] (+0.0 where this rank does not own the target).

    h [M, H], w_local [V_local, H] = rows first_id .. of the head, both fp32 or both bf16, first_id a multiple of vocab_leaf; targets
    int64 [M]. Logits are fp32 in either case. ValueError for other shapes, dtypes or leaves.
    """
    _check_head(h, w_local, targets)
    _check_leaves(len(w_local), vocab_leaf, first_id, nodes, k_leaf)
    if device.on_gpu(h, w_local, targets):
        from kernels.gpu import logprob as gpu

        return gpu.partials(h, w_local, targets, inv_temp, k_leaf, vocab_leaf, first_id, nodes)
    targets, stats, target = _outputs(targets, nodes)
    build.library().logprob_partials(
        *_operands(h, w_local), k_leaf, vocab_leaf, first_id, float(inv_temp), targets, _table(nodes), len(nodes), stats, target
    )
    return stats, target


def partials_from_logits(
    logits: Tensor, targets: Tensor, inv_temp: float, vocab_leaf: int, first_id: int, nodes: Sequence[reduce.Node]
) -> tuple[Tensor, Tensor]:
    """The same bits from logits fp32 [M, V_local] that exist already (sampling needs them)."""
    if logits.dtype is not torch.float32 or logits.shape[:1] != targets.shape or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(f"logprob: logits {logits.dtype} {tuple(logits.shape)}, targets {tuple(targets.shape)}")
    _check_leaves(logits.shape[1], vocab_leaf, first_id, nodes)
    if device.on_gpu(logits, targets):
        from kernels.gpu import logprob as gpu

        return gpu.partials_from_logits(logits, targets, inv_temp, vocab_leaf, first_id, nodes)
    targets, stats, target = _outputs(targets, nodes)
    build.library().logprob_partials_of_logits(
        logits, logits.stride(0), *logits.shape, vocab_leaf, first_id, float(inv_temp), targets, _table(nodes), len(nodes), stats, target
    )
    return stats, target


def merge(a: Tensor, b: Tensor) -> Tensor:
    """Statistics [..., 3] of a node from those of its halves."""
    if device.on_gpu(a, b):
        from kernels.gpu import logprob as gpu

        return gpu.merge(a, b)
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty(a.shape, dtype=torch.float32)
    build.library().logprob_merge(a, b, out, a.numel() // 3)
    return out


def combine(stats: Mapping[reduce.Node, Tensor], num_leaves: int) -> Tensor:
    """Statistics [M, 3] of the whole vocabulary from those of nodes that cover it once."""
    return reduce.combine(stats, num_leaves, merge)


def finish(stats: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logprob = (y_target - m) - log s, entropy = log s - t / s, lse = m + log s: fp32 [M] each, in nats."""
    if device.on_gpu(stats, target):
        from kernels.gpu import logprob as gpu

        return gpu.finish(stats, target)
    stats, target = stats.contiguous(), target.contiguous()
    out = torch.empty(3, len(target), dtype=torch.float32)
    build.library().logprob_finish(stats, target, len(target), out)
    return out[0], out[1], out[2]


def backward(
    h: Tensor,
    w_local: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    g_logprob: Tensor,
    g_entropy: Tensor,
    inv_temp: float,
    k_leaf: int,
    vocab_leaf: int,
    first_id: int,
    nodes: Sequence[reduce.Node],
    acc: Tensor | None,
    tiles: Tensor,
    scale_log2: int,
) -> Tensor:
    """dh partials fp32 [len(nodes), M, H] (a chain over the ids of a leaf, the halving tree over leaves); acc int64 [V_local, H] += dw.

    Logits are recomputed leaf by leaf. With d = y - lse and p = exp(d), rounded in this order, without FMA:
    dlogit = inv_temp * (g_logprob * ((1 if target else 0) - p) - g_entropy * (p * (d + entropy))),
    which, like every activation's gradient, is stored in the operands' dtype: bf16 rounds it once.
    h, w_local as in `partials`; lse, entropy, g_logprob, g_entropy fp32 [M]; tiles, scale_log2 and OverflowError as in
    linear.accumulate_weight_grad. acc None: dw is not wanted.
    """
    _check_head(h, w_local, targets)
    _check_leaves(len(w_local), vocab_leaf, first_id, nodes, k_leaf)
    rows = [lse, entropy, g_logprob, g_entropy]
    if any(t.dtype is not torch.float32 or t.shape != targets.shape for t in rows):
        raise ValueError(f"logprob: expected four fp32 [{len(targets)}], got {[(t.dtype, tuple(t.shape)) for t in rows]}")
    if acc is not None and (acc.dtype is not torch.int64 or acc.shape != w_local.shape or not acc.is_contiguous()):
        raise ValueError(f"logprob: acc {acc.dtype} {tuple(acc.shape)} does not fit w {tuple(w_local.shape)}")
    if device.on_gpu(h, w_local, targets, *rows, acc):
        from kernels.gpu import logprob as gpu

        return gpu.backward(
            h, w_local, targets, lse, entropy, g_logprob, g_entropy, inv_temp, k_leaf, vocab_leaf, first_id, nodes, acc, tiles, scale_log2
        )
    tiles = linear.boundaries(tiles, len(h))
    targets, rows = targets.to(torch.int64).contiguous(), [t.contiguous() for t in rows]
    dh = torch.empty(len(nodes), *h.shape, dtype=torch.float32)
    if build.library().logprob_backward(
        *_operands(h, w_local), k_leaf, vocab_leaf, first_id, float(inv_temp), targets, *rows, _table(nodes), len(nodes),
        acc, tiles, len(tiles) - 1, 2.0**scale_log2, dh,
    ):  # fmt: skip
        raise OverflowError(f"the head's gradient left the range of int64 at scale 2^{scale_log2}")
    return dh


def stats_reference(logits: Tensor, inv_temp: float) -> Tensor:
    """(m, s, t) [M, 3] of whole rows in plain torch, in the dtype of the logits."""
    y = logits * inv_temp
    m = y.amax(1)
    e = torch.exp(y - m[:, None])
    return torch.stack([m, e.sum(1), (e * (y - m[:, None])).sum(1)], dim=1)


def _check_head(h: Tensor, w: Tensor, targets: Tensor) -> None:
    good = h.dtype in _FLOATS and w.dtype is h.dtype and h.dim() == w.dim() == 2 and h.shape[1] == w.shape[1] and len(targets) == len(h)
    if not good or any(t.shape[1] > 1 and t.stride(1) != 1 for t in (h, w)):
        raise ValueError(f"logprob: h {h.dtype} {tuple(h.shape)}, w {w.dtype} {tuple(w.shape)}, targets {tuple(targets.shape)} don't fit")


def _operands(h: Tensor, w: Tensor) -> tuple:
    """h widened (it is small), w as it is stored."""
    half, h = w.dtype is torch.bfloat16, h.float()
    return h, h.stride(0), w, w.stride(0), half, len(h), *w.shape


def _outputs(targets: Tensor, nodes: Sequence[reduce.Node]) -> tuple[Tensor, Tensor, Tensor]:
    targets = targets.to(torch.int64).contiguous()
    stats = torch.empty((len(nodes), len(targets), 3), dtype=torch.float32)
    return targets, stats, torch.zeros(len(targets), dtype=torch.float32)


@functools.lru_cache(maxsize=256)
def _node_table(nodes: tuple[reduce.Node, ...]) -> Tensor:
    return torch.tensor(nodes, dtype=torch.int64).reshape(-1, 2)


def _table(nodes: Sequence[reduce.Node]) -> Tensor:
    """int64 [len(nodes), 2]."""
    return _node_table(tuple(nodes))


def _check_leaves(num_rows: int, vocab_leaf: int, first_id: int, nodes: Sequence[reduce.Node], k_leaf: int = 1) -> None:
    if vocab_leaf < 1 or k_leaf < 1:
        raise ValueError(f"logprob: leaves of {k_leaf} features and {vocab_leaf} ids; both must be positive")
    first, last = first_id // vocab_leaf, -(-(first_id + num_rows) // vocab_leaf)
    covered = [leaf for lo, hi in nodes for leaf in range(lo, hi)]
    if first_id % vocab_leaf or (num_rows and covered != list(range(first, last))):
        raise ValueError(f"logprob: rows {first_id} .. {first_id + num_rows} are not the vocabulary leaves {list(nodes)} of {vocab_leaf}")

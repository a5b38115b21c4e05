"""Log-probability and entropy of softmax(h @ w^T * inv_temp), fused with the head: only one vocabulary leaf of logits exists at a time.

With y = logit * inv_temp, a vocabulary leaf gives three statistics: m = max y, s = sum exp(y - m), t = sum exp(y - m) * (y - m).
Sums run over 16 lanes (see rms_norm). Statistics of leaves are merged on the halving tree over the whole vocabulary:

    m = max(ma, mb), ea = exp(ma - m), eb = exp(mb - m)
    s = sa * ea + sb * eb
    t = (ta + sa * (ma - m)) * ea + (tb + sb * (mb - m)) * eb

Ranks own whole vocabulary leaves. A rank's `nodes` are its maximal tree nodes (lo, hi), in global leaf numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kernels import linear, reduce
from kernels.cpu import build


def partials(
    h: Tensor, w_local: Tensor, targets: Tensor, inv_temp: float, k_leaf: int, vocab_leaf: int, first_id: int, nodes: Sequence[reduce.Node]
) -> tuple[Tensor, Tensor]:
    """Statistics fp32 [len(nodes), M, 3] = (m, s, t) and y of the targets fp32 [M] (+0.0 where this rank does not own the target).

    h fp32 [M, H], w_local fp32 [V_local, H] = rows first_id .. of the head, first_id a multiple of vocab_leaf; targets int64 [M].
    """
    return _partials(lambda a, b: linear.forward(h, w_local[a:b], k_leaf), len(w_local), targets, inv_temp, vocab_leaf, first_id, nodes)


def partials_from_logits(
    logits: Tensor, targets: Tensor, inv_temp: float, vocab_leaf: int, first_id: int, nodes: Sequence[reduce.Node]
) -> tuple[Tensor, Tensor]:
    """The same bits from logits fp32 [M, V_local] that exist already (sampling needs them)."""
    return _partials(lambda a, b: logits[:, a:b], logits.shape[1], targets, inv_temp, vocab_leaf, first_id, nodes)


def merge(a: Tensor, b: Tensor) -> Tensor:
    """Statistics [..., 3] of a node from those of its halves."""
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty(a.shape, dtype=torch.float32)
    build.library().logprob_merge(a, b, out, a.numel() // 3)
    return out


def combine(stats: Mapping[reduce.Node, Tensor], num_leaves: int) -> Tensor:
    """Statistics [M, 3] of the whole vocabulary from those of nodes that cover it once."""
    return reduce.combine(stats, num_leaves, merge)


def finish(stats: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logprob = (y_target - m) - log s, entropy = log s - t / s, lse = m + log s: fp32 [M] each, in nats."""
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
    dlogit = inv_temp * (g_logprob * ((1 if target else 0) - p) - g_entropy * (p * (d + entropy))).
    lse, entropy, g_logprob, g_entropy fp32 [M]; tiles and scale_log2 as in linear.accumulate_weight_grad. acc None: dw is not wanted.
    """
    first_leaf = first_id // vocab_leaf

    def leaf_grad(leaf: int) -> Tensor:
        a, b = _leaf_rows(leaf - first_leaf, vocab_leaf, len(w_local))
        w = w_local[a:b]
        dlogits = linear.forward(h, w, k_leaf)
        _logit_grad(dlogits, targets - (first_id + a), lse, entropy, g_logprob, g_entropy, inv_temp)
        if acc is not None:
            linear.accumulate_weight_grad(acc[a:b], dlogits, h, tiles, scale_log2)
        return linear.input_grad(dlogits, w, b - a)

    _check_leaves(len(w_local), vocab_leaf, first_id, nodes)
    dh = torch.empty(len(nodes), *h.shape, dtype=torch.float32)
    for out, (lo, hi) in zip(dh, nodes, strict=True):
        out.copy_(reduce.halving(lo, hi, leaf_grad))
    return dh


def stats_reference(logits: Tensor, inv_temp: float) -> Tensor:
    """(m, s, t) [M, 3] of whole rows in plain torch, in the dtype of the logits."""
    y = logits * inv_temp
    m = y.amax(1)
    e = torch.exp(y - m[:, None])
    return torch.stack([m, e.sum(1), (e * (y - m[:, None])).sum(1)], dim=1)


def _partials(
    leaf_logits: Callable[[int, int], Tensor],
    num_rows: int,
    targets: Tensor,
    inv_temp: float,
    vocab_leaf: int,
    first_id: int,
    nodes: Sequence[reduce.Node],
) -> tuple[Tensor, Tensor]:
    _check_leaves(num_rows, vocab_leaf, first_id, nodes)
    targets = targets.to(torch.int64).contiguous()
    target = torch.zeros(len(targets), dtype=torch.float32)
    first_leaf = first_id // vocab_leaf

    def leaf_stats(leaf: int) -> Tensor:
        a, b = _leaf_rows(leaf - first_leaf, vocab_leaf, num_rows)
        logits = leaf_logits(a, b)
        stats = torch.empty(len(targets), 3, dtype=torch.float32)
        build.library().logprob_leaf(
            logits, logits.stride(0), len(targets), b - a, ctypes.c_float(inv_temp), targets, first_id + a,
            stats, target,
        )  # fmt: skip
        return stats

    values = [reduce.halving(lo, hi, leaf_stats, merge) for lo, hi in nodes]
    return torch.stack(values) if values else torch.empty(0, len(targets), 3, dtype=torch.float32), target


def _logit_grad(logits: Tensor, local: Tensor, lse: Tensor, entropy: Tensor, g_logprob: Tensor, g_entropy: Tensor, inv_temp: float) -> None:
    """Logits of one leaf become their gradient, in place; `local` is the target's column, outside [0, columns) when it lies elsewhere."""
    rows = [t.contiguous() for t in (local.to(torch.int64), lse, entropy, g_logprob, g_entropy)]
    build.library().logprob_logit_grad(logits, *logits.shape, ctypes.c_float(inv_temp), *rows)


def _leaf_rows(index: int, vocab_leaf: int, num_rows: int) -> tuple[int, int]:
    return index * vocab_leaf, min((index + 1) * vocab_leaf, num_rows)


def _check_leaves(num_rows: int, vocab_leaf: int, first_id: int, nodes: Sequence[reduce.Node]) -> None:
    first, last = first_id // vocab_leaf, -(-(first_id + num_rows) // vocab_leaf)
    covered = [leaf for lo, hi in nodes for leaf in range(lo, hi)]
    if first_id % vocab_leaf or (num_rows and covered != list(range(first, last))):
        raise ValueError(f"logprob: rows {first_id} .. {first_id + num_rows} are not the vocabulary leaves {list(nodes)} of {vocab_leaf}")

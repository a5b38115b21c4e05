"""What is certified of kernels/logprob.py: the fused head's statistics, logprob, entropy and its two gradients.

rule              statistics equal to linear's and elementwise's references on the trees, one vocabulary leaf at a time
rows              M rows at any offset, forward and backward
logits            from logits that exist already = fused
tensor parallel   vocabulary leaves cut over ranks, nodes merged by the tree
data parallel     token leaves of the head's gradient on any rank: integer sums
padding           h and w as views into NaN
C++, builds and threads, flush to zero: see setting.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels import elementwise, linear, logprob, reduce
from kernels.certify.core import Case
from kernels.certify.linear import rank_nodes
from kernels.certify.setting import Setting, Shape, host

TENSOR_CORES = True
DTYPES = (torch.float32, torch.bfloat16)
TINY: tuple[Shape, ...] = ((3, 10, 40, 16), (2, 33, 70, 32))  # M, H, V, vocabulary leaf
SCALE, K_LEAF, INV_TEMP = 40, 16, 1.25


def cases(s: Setting) -> Iterator[Case]:
    if s.has_rule:
        for shape in TINY:
            for down in (0, -66):
                yield Case(
                    "rule",
                    f"{shape} * 2^{down}",
                    lambda a=shape, d=down: statistics(s, *a, scale_log2=d),
                    lambda a=shape, d=down: references(s, *a, scale_log2=d),
                )
    yield from rows(s)
    yield from tensor_parallel(s)
    yield from data_parallel(s)
    for m in (1, 9):
        yield Case("padding", f"M={m}", lambda m=m: outputs(s, m, 40, 100, 32, framed=True), lambda m=m: outputs(s, m, 40, 100, 32))
        yield Case("logits", f"M={m}", lambda m=m: from_logits(s, m), lambda m=m: statistics(s, m, 40, 100, 32))
    for shape in ((1, 20, 70, 16), (9, 33, 70, 32)) if s.small else ((1, 70, 777, 200), (60, 70, 777, 200)):
        yield from s.circumstances(f"{shape}", lambda s, a=shape: outputs(s, *a))
    yield from s.flush_to_zero("products of 2^-132", lambda s: outputs(s, 9, 40, 100, 32, -66))


def operands(s: Setting, m: int, h: int, v: int, scale_log2: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """h [M,H], w [V,H], targets [M]."""
    hidden, w = s.values(m, h, seed=1, scale_log2=scale_log2), s.values(v, h, seed=2, scale_log2=scale_log2)
    return hidden, w, s.on(torch.arange(m) * 7 % v)


def statistics(s: Setting, m: int, h: int, v: int, leaf: int, scale_log2: int = 0) -> tuple[Tensor, Tensor]:
    hidden, w, targets = operands(s, m, h, v, scale_log2)
    stats, target = logprob.partials(hidden, w, targets, INV_TEMP, K_LEAF, leaf, 0, [(0, -(-v // leaf))])
    return stats[0], target


def from_logits(s: Setting, m: int) -> tuple[Tensor, Tensor]:
    hidden, w, targets = operands(s, m, 40, 100)
    logits = linear.forward(hidden, w, K_LEAF) if s.dtype == torch.float32 else linear.forward(hidden, w, K_LEAF, torch.float32)
    stats, target = logprob.partials_from_logits(logits, targets, INV_TEMP, 32, 0, [(0, 4)])
    return stats[0], target


def references(s: Setting, m: int, h: int, v: int, leaf: int, scale_log2: int) -> tuple[Tensor, Tensor]:
    """(m, s, t) by the rule in the docstring of kernels/logprob.py, and the targets' y."""
    hidden, w, targets = host(*operands(s, m, h, v, scale_log2))
    y = linear.forward_reference(hidden, w, K_LEAF) * torch.tensor(INV_TEMP)

    def leaf_stats(i: int) -> Tensor:
        part = y[:, i * leaf : (i + 1) * leaf]
        top = part.amax(1)
        d = part - top[:, None]
        e = elementwise.exp_reference(d)
        return torch.stack([top, lanes(e), lanes(e * d)], 1)

    def merge(a: Tensor, b: Tensor) -> Tensor:
        (ma, sa, ta), (mb, sb, tb) = a.unbind(1), b.unbind(1)
        top = torch.maximum(ma, mb)
        ea, eb = elementwise.exp_reference(ma - top), elementwise.exp_reference(mb - top)
        t = (ta + sa * (ma - top)) * ea + (tb + sb * (mb - top)) * eb
        return torch.stack([top, sa * ea + sb * eb, t], 1)

    return reduce.halving(0, -(-v // leaf), leaf_stats, merge), y.gather(1, targets[:, None])[:, 0]


def lanes(terms: Tensor) -> Tensor:
    """Row sums in 16 lanes, added 16-8-4-2-1."""
    padded = torch.nn.functional.pad(terms, (0, -terms.shape[1] % 16)).unflatten(1, (-1, 16))
    total = torch.zeros_like(padded[:, 0])
    for i in range(padded.shape[1]):
        total = total + padded[:, i]
    for width in (8, 4, 2, 1):
        total = total[:, :width] + total[:, width : 2 * width]
    return total[:, 0]


def outputs(s: Setting, m: int, h: int, v: int, leaf: int, scale_log2: int = 0, framed: bool = False) -> list[Tensor]:
    """logprob, entropy, lse, dh [1,M,H] and the exact gradient of the head."""
    hidden, w, targets = operands(s, m, h, v, scale_log2)
    if framed:
        hidden, w = s.framed(hidden), s.framed(w)
    nodes, acc = [(0, -(-v // leaf))], s.zeros(v, h)
    stats, target = logprob.partials(hidden, w, targets, INV_TEMP, K_LEAF, leaf, 0, nodes)
    logps, entropy, lse = logprob.finish(stats[0], target)
    g, g_entropy = s.fp32(m, seed=3), s.fp32(m, seed=4)
    rest = lse, entropy, g, g_entropy, INV_TEMP, K_LEAF, leaf, 0, nodes, acc, s.counts(0, m // 2, m), SCALE
    return [logps, entropy, lse, logprob.backward(hidden, w, targets, *rest), acc]


def backward(s: Setting, own: slice, hidden: Tensor, w: Tensor, targets: Tensor, saved: tuple[Tensor, ...], acc: Tensor | None) -> Tensor:
    """dh [M,H] of the rows `own`."""
    count, leaf = own.stop - own.start, 32
    rest: tuple = *(t[own] for t in saved), INV_TEMP, K_LEAF, leaf, 0, [(0, -(-len(w) // leaf))], acc, s.counts(0, count), SCALE
    return logprob.backward(hidden[own], w, targets[own], *rest)[0]


def forward(hidden: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    stats, target = logprob.partials(hidden, w, targets, INV_TEMP, K_LEAF, 32, 0, [(0, -(-len(w) // 32))])
    return logprob.finish(stats[0], target)


def rows(s: Setting) -> Iterator[Case]:
    m = 20 if s.device == "interpreter" else 260
    hidden, w, targets = operands(s, m, 40, 100)
    whole = forward(hidden, w, targets)
    saved = whole[2], whole[1], s.fp32(m, seed=3), s.fp32(m, seed=4)
    dh = backward(s, slice(0, m), hidden, w, targets, saved, None)
    for count in (c for c in s.rows if c <= m):
        for a in sorted({0, m // 3, m - count} & set(range(m - count + 1))):
            own, name = slice(a, a + count), f"M={count} at {a}"
            args = s, own, hidden, w, targets, saved, None
            yield Case(
                "rows", f"forward, {name}", lambda o=own: forward(hidden[o], w, targets[o]), lambda o=own: [t[o] for t in whole]
            )  # fmt: skip
            yield Case("rows", f"backward, {name}", lambda a=args: backward(*a), lambda o=own: dh[o])


def tensor_parallel(s: Setting) -> Iterator[Case]:
    leaf, v, m = 16, 75 if s.device == "interpreter" else 390, 5
    leaves = -(-v // leaf)
    hidden, w, targets = operands(s, m, 40, v)
    saved = s.fp32(m, seed=5), s.fp32(m, seed=6), s.fp32(m, seed=3), s.fp32(m, seed=4)

    def ranks(tp: int) -> list[Tensor]:
        """Statistics, y of the targets, dh and the head's gradient, from the ranks' own rows of the head."""
        stats, dh, target, grads = {}, {}, s.on(torch.zeros(m)), []
        for r in range(tp):
            a, b = leaves * r // tp, leaves * (r + 1) // tp
            own, nodes = w[a * leaf : b * leaf], reduce.nodes(leaves, a, b)
            acc = s.zeros(len(own), 40)
            values, y = logprob.partials(hidden, own, targets, INV_TEMP, K_LEAF, leaf, a * leaf, nodes)
            rest = *saved, INV_TEMP, K_LEAF, leaf, a * leaf, nodes, acc, s.counts(0, m), SCALE
            stats |= dict(zip(nodes, values))
            dh |= dict(zip(nodes, logprob.backward(hidden, own, targets, *rest)))
            target, grads = target + y, [*grads, acc]
        return [logprob.combine(stats, leaves), target, reduce.combine(dh, leaves), torch.cat(grads)]

    for tp in s.ranks:
        assert len(rank_nodes(leaves, tp)) >= tp
        yield Case("tensor parallel", f"tp={tp}", lambda tp=tp: ranks(tp), lambda: ranks(1))


def data_parallel(s: Setting) -> Iterator[Case]:
    m, bounds = 24, [0, 1, 3, 8, 9, 17, 20, 21, 24]
    hidden, w, targets = operands(s, m, 40, 70)
    saved = s.fp32(m, seed=5), s.fp32(m, seed=6), s.fp32(m, seed=3), s.fp32(m, seed=4)

    def sums(dp: int) -> Tensor:
        acc = s.zeros(70, 40)
        for rank in reversed(range(dp)):
            for a, b in list(zip(bounds, bounds[1:]))[rank::dp]:
                backward(s, slice(a, b), hidden, w, targets, saved, acc)
        return acc

    def at_once() -> Tensor:
        acc = s.zeros(70, 40)
        logprob.backward(hidden, w, targets, *saved, INV_TEMP, K_LEAF, 32, 0, [(0, 3)], acc, s.counts(*bounds), SCALE)
        return acc

    for dp in s.ranks:
        yield Case("data parallel", f"dp={dp}", lambda dp=dp: sums(dp), at_once)

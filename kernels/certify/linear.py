"""What is certified of kernels/linear.py: forward [M,K] x [N,K], input gradient, exact weight gradient.

rule              equal to the reference, ragged leaves, subnormal products among them
rows              M rows at any offset are the rows of the whole: decode (M = 1), prefill and every chunking
schedules         (Triton) the tree in one program, or cut over programs at any depth
columns           N cut at any column
tensor parallel   K (forward) or N (input gradient) cut at leaves over ranks, nodes combined by the tree
data parallel     token leaves on any rank in any order: integer sums
padding           operands as views into NaN
C++, builds and threads, flush to zero: see setting.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels import device, linear, reduce
from kernels.certify.core import Case
from kernels.certify.setting import Setting, Shape, host

TENSOR_CORES = True
DTYPES = (torch.float32, torch.bfloat16)
SCALE = 40
TINY: tuple[Shape, ...] = ((1, 5, 7, 3), (5, 37, 70, 16), (2, 3, 200, 1), (17, 20, 33, 128))  # M, N, K, leaf


def cases(s: Setting) -> Iterator[Case]:
    for shape in TINY[: 2 if s.quick else None]:
        if s.has_rule:
            for down in (0, -66):  # products down to 2^-149: subnormal
                yield Case(
                    "rule",
                    f"{shape} * 2^{down}",
                    lambda a=shape, d=down: outputs(s, *a, scale_log2=d),
                    lambda a=shape, d=down: references(s, *a, scale_log2=d),
                )
    yield from schedules(s)
    yield from rows(s)
    yield from tensor_parallel(s)
    yield from data_parallel(s)
    for m in (1, 7, 40):
        yield Case("padding", f"M={m}", lambda m=m: outputs(s, m, 50, 70, 16, framed=True), lambda m=m: outputs(s, m, 50, 70, 16))
    for shape in (
        ((1, 70, 100, 32), (6, 50, 40, 16), (30, 90, 70, 32)) if s.small else ((1, 700, 300, 64), (33, 90, 70, 32), (130, 300, 200, 64))
    ):
        yield from s.circumstances(f"{shape}", lambda s, a=shape: outputs(s, *a))
    yield from s.flush_to_zero("products of 2^-132", lambda s: outputs(s, 9, 40, 70, 16, -66))


def schedules(s: Setting) -> Iterator[Case]:
    """Triton: the tree in one program's registers and workspace, or cut at any depth over programs. Deep trees on a GPU."""
    if s.device == "cpu":
        return
    from kernels.gpu import linear as gpu

    def product(m: int, k: int, leaf: int, split: int) -> Tensor:
        x, _, w = operands(s, m, 40 if s.small else 300, k)
        device.on_gpu(x)
        return gpu._product(x, w, len(w), w.stride(0), 1, leaf, x.dtype, split)

    for m, k, leaf in ((5, 70, 8), (18, 96, 16)) if s.small else ((1, 3072, 128), (64, 12288, 128), (200, 3072, 128), (300, 12288, 64)):
        for split in (1, 2, 3) if s.small else (1, 3, 6):
            yield Case(
                "schedules",
                f"M={m} K={k}, 2^{split} programs a sum",
                lambda a=(m, k, leaf, split): product(*a),
                lambda a=(m, k, leaf, 0): product(*a),
            )


def operands(s: Setting, m: int, n: int, k: int, scale_log2: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x [M,K], dy [M,N], w [N,K]."""
    return tuple(s.values(*shape, seed=i, scale_log2=scale_log2) for i, shape in enumerate(((m, k), (m, n), (n, k))))


def outputs(s: Setting, m: int, n: int, k: int, leaf: int, scale_log2: int = 0, framed: bool = False) -> list[Tensor]:
    x, dy, w = (s.framed(t) if framed else t for t in operands(s, m, n, k, scale_log2))
    acc = s.zeros(n, k)
    linear.accumulate_weight_grad(acc, dy, x, s.counts(0, m // 3, m // 2, m), SCALE)
    results = [linear.forward(x, w, leaf), linear.input_grad(dy, w, leaf), acc]
    if s.dtype != torch.float32:  # a tensor-parallel partial keeps all bits of its sum
        results += [linear.forward(x, w, leaf, torch.float32), linear.input_grad(dy, w, leaf, torch.float32)]
    return results


def references(s: Setting, m: int, n: int, k: int, leaf: int, scale_log2: int) -> list[Tensor]:
    x, dy, w = host(*operands(s, m, n, k, scale_log2))
    acc = torch.zeros(n, k, dtype=torch.int64)
    linear.accumulate_weight_grad_reference(acc, dy, x, torch.tensor([0, m // 3, m // 2, m]), SCALE)
    y, dx = linear.forward_reference(x, w, leaf), linear.input_grad_reference(dy, w, leaf)
    return [s.store(y), s.store(dx), acc] + ([y, dx] if s.dtype != torch.float32 else [])


def rows(s: Setting) -> Iterator[Case]:
    m, n, k, leaf = (40, 20, 40, 16) if s.device == "interpreter" else (300, 130, 200, 64)
    x, dy, w = operands(s, m, n, k)
    y, dx = linear.forward(x, w, leaf), linear.input_grad(dy, w, leaf)
    for count in (c for c in s.rows if c <= m):
        for a in sorted({0, 1, m // 3, m - count} & set(range(m - count + 1))):
            own = slice(a, a + count)
            yield Case("rows", f"forward, M={count} at {a}", lambda o=own: linear.forward(x[o], w, leaf), lambda o=own: y[o])
            yield Case("rows", f"input_grad, M={count} at {a}", lambda o=own: linear.input_grad(dy[o], w, leaf), lambda o=own: dx[o])
    for a, b in ((0, 1), (3, 10), (5, n), (n - 1, n)):
        yield Case(
            "columns", f"forward, N={a}:{b}, M=17", lambda a=a, b=b: linear.forward(x[:17], w[a:b], leaf), lambda a=a, b=b: y[:17, a:b]
        )
        yield Case("columns", f"forward, N={a}:{b}, M=1", lambda a=a, b=b: linear.forward(x[:1], w[a:b], leaf), lambda a=a, b=b: y[:1, a:b])
        inner = slice(a, min(b, k))
        yield Case("columns", f"input_grad, K={a}:{b}", lambda o=inner: linear.input_grad(dy, w[:, o], leaf), lambda o=inner: dx[:, o])


def tensor_parallel(s: Setting) -> Iterator[Case]:
    leaf, leaves = 16, 5 if s.device == "interpreter" else 25
    for m in (1, 20):
        x, dy, w = operands(s, m, leaf * leaves - 3, leaf * leaves - 3)  # the last leaf is short
        for tp in s.ranks:
            for function, split, a in ((linear.forward, split_forward, x), (linear.input_grad, split_input_grad, dy)):
                args: tuple = (a, w, leaf)
                yield Case(
                    "tensor parallel",
                    f"{function.__name__}, tp={tp}, M={m}",
                    lambda f=split, a=args, tp=tp: f(*a, tp=tp),
                    lambda f=function, a=args: whole(f, *a),
                )


def whole(function, x: Tensor, w: Tensor, leaf: int) -> Tensor:
    """The result before it is stored, which is what ranks add up to."""
    return function(x, w, leaf) if x.dtype == torch.float32 else function(x, w, leaf, torch.float32)


def rank_nodes(leaves: int, tp: int) -> list[reduce.Node]:
    """Maximal nodes of all ranks, when rank r holds leaves [leaves * r // tp, leaves * (r + 1) // tp)."""
    return [node for r in range(tp) for node in reduce.nodes(leaves, leaves * r // tp, leaves * (r + 1) // tp)]


def split_forward(x: Tensor, w: Tensor, leaf: int, tp: int) -> Tensor:
    leaves = -(-x.shape[1] // leaf)
    cut = {(a, b): slice(a * leaf, b * leaf) for a, b in rank_nodes(leaves, tp)}
    return reduce.combine({node: whole(linear.forward, x[:, k], w[:, k], leaf) for node, k in cut.items()}, leaves)


def split_input_grad(dy: Tensor, w: Tensor, leaf: int, tp: int) -> Tensor:
    leaves = -(-dy.shape[1] // leaf)
    cut = {(a, b): slice(a * leaf, b * leaf) for a, b in rank_nodes(leaves, tp)}
    return reduce.combine({node: whole(linear.input_grad, dy[:, n], w[n], leaf) for node, n in cut.items()}, leaves)


def data_parallel(s: Setting) -> Iterator[Case]:
    """Sixteen token leaves of uneven length, rank r holding every dp-th, last first."""
    m = 40 if s.small else 150
    bounds = sorted({m * i * i // 256 for i in range(17)})
    x, dy, _ = operands(s, m, 30, 40)

    def sums(dp: int) -> Tensor:
        total = s.zeros(30, 40)
        for rank in reversed(range(dp)):
            own = s.zeros(30, 40)
            for a, b in list(zip(bounds, bounds[1:]))[rank::dp]:
                linear.accumulate_weight_grad(own, dy[a:b], x[a:b], s.counts(0, b - a), SCALE)
            total += own
        return total

    def at_once() -> Tensor:
        acc = s.zeros(30, 40)
        linear.accumulate_weight_grad(acc, dy, x, s.counts(*bounds), SCALE)
        return acc

    for dp in s.ranks:
        yield Case("data parallel", f"dp={dp}", lambda dp=dp: sums(dp), at_once)

"""What is certified of kernels/rms_norm.py: forward, input gradient and exact weight gradient, of rows and of heads.

rule              equal to the references, with dims that do not fill 16 lanes, and subnormal numbers
rows              M rows at any offset are the rows of the whole
columns           heads of a larger tensor, at a stride (a tensor-parallel rank's heads)
data parallel     token tiles of the weight gradient on any rank: integer sums
padding           x and dy as views into NaN
C++, builds and threads, flush to zero: see setting.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels import rms_norm
from kernels.certify.core import Case
from kernels.certify.setting import Setting, Shape, host

DTYPES = (torch.float32, torch.bfloat16)
TINY: tuple[Shape, ...] = ((1, 1, 7), (5, 3, 16), (4, 1, 70), (9, 2, 128))  # M, G, D
SCALE, EPS = 40, 1e-6


def cases(s: Setting) -> Iterator[Case]:
    for shape in TINY:
        for down in (0, -135):
            yield Case(
                "rule",
                f"{shape} * 2^{down}",
                lambda a=shape, d=down: outputs(s, *a, scale_log2=d),
                lambda a=shape, d=down: references(s, *a, scale_log2=d),
            )
    yield from rows(s)
    yield from data_parallel(s)
    yield Case("padding", "x, dy inside NaN", lambda: outputs(s, 9, 3, 40, framed=True), lambda: outputs(s, 9, 3, 40))
    for shape in ((1, 1, 64), (11, 2, 40)) if s.small else ((1, 1, 1024), (200, 3, 70), (64, 1, 1024)):
        yield from s.circumstances(f"{shape}", lambda s, a=shape: outputs(s, *a))
    yield from s.flush_to_zero("numbers of 2^-135", lambda s: outputs(s, 9, 3, 40, -135))


def operands(s: Setting, m: int, g: int, d: int, scale_log2: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, dy [M,G,D] and w [D]."""
    return s.values(m, g, d, seed=1, scale_log2=scale_log2), s.values(m, g, d, seed=2, scale_log2=scale_log2), s.values(d, seed=3)


def outputs(s: Setting, m: int, g: int, d: int, scale_log2: int = 0, framed: bool = False) -> list[Tensor]:
    """y, rstd, dx, dw."""
    x, dy, w = operands(s, m, g, d, scale_log2)
    if framed:
        x, dy = s.framed(x), s.framed(dy)
    y, rstd = rms_norm.forward(x, w, EPS)
    acc = s.zeros(d)
    return [y, rstd, rms_norm.backward(dy, x, w, rstd, acc, s.counts(0, m // 2, m), SCALE), acc]


def references(s: Setting, m: int, g: int, d: int, scale_log2: int) -> list[Tensor]:
    x, dy, w = host(*operands(s, m, g, d, scale_log2))
    y, rstd = rms_norm.forward_reference(x, w, EPS)
    acc = torch.zeros(d, dtype=torch.int64)
    dx = rms_norm.backward_reference(dy, x, w, rstd, acc, torch.tensor([0, m // 2, m]), SCALE)
    return [s.store(y), rstd, s.store(dx), acc]


def rows(s: Setting) -> Iterator[Case]:
    m = 20 if s.device == "interpreter" else 260
    x, dy, w = operands(s, m, 3, 40)
    y, rstd = rms_norm.forward(x, w, EPS)
    dx = rms_norm.backward(dy, x, w, rstd)
    for count in (c for c in s.rows if c <= m):
        for a in sorted({0, m // 3, m - count} & set(range(m - count + 1))):
            own, name = slice(a, a + count), f"M={count} at {a}"
            yield Case("rows", f"forward, {name}", lambda o=own: rms_norm.forward(x[o], w, EPS), lambda o=own: (y[o], rstd[o]))
            yield Case("rows", f"backward, {name}", lambda o=own: rms_norm.backward(dy[o], x[o], w, rstd[o]), lambda o=own: dx[o])
    for a, b in ((0, 1), (1, 3), (2, 3)):
        yield Case(
            "columns",
            f"heads {a}:{b}",
            lambda o=slice(a, b): rms_norm.forward(x[:, o], w, EPS),
            lambda o=slice(a, b): (y[:, o], rstd[:, o]),
        )


def data_parallel(s: Setting) -> Iterator[Case]:
    m, bounds = 24, [0, 1, 3, 8, 9, 17, 20, 21, 24]
    x, dy, w = operands(s, m, 2, 40)
    rstd = rms_norm.forward(x, w, EPS)[1]

    def sums(dp: int) -> Tensor:
        acc = s.zeros(40)
        for rank in reversed(range(dp)):
            for a, b in list(zip(bounds, bounds[1:]))[rank::dp]:
                rms_norm.backward(dy[a:b], x[a:b], w, rstd[a:b], acc, s.counts(0, b - a), SCALE)
        return acc

    def at_once() -> Tensor:
        acc = s.zeros(40)
        rms_norm.backward(dy, x, w, rstd, acc, s.counts(*bounds), SCALE)
        return acc

    for dp in s.ranks:
        yield Case("data parallel", f"dp={dp}", lambda dp=dp: sums(dp), at_once)

"""What is certified of kernels/rope.py: the tables, and the rotation forward and back.

rule              equal to the references, subnormal numbers among them
rows              rows at any offset with their own positions: decode, chunks, context-parallel tiles
columns           heads of a larger tensor
padding           x as a view into NaN
C++, builds and threads, flush to zero: see setting.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels import rope
from kernels.certify.core import Case
from kernels.certify.setting import Setting, Shape, host

DTYPES = (torch.float32, torch.bfloat16)
TINY: tuple[Shape, ...] = ((3, 2, 8), (9, 3, 70))  # M, heads, D
THETA = 1e6


def cases(s: Setting) -> Iterator[Case]:
    for down in (0, -135):
        for shape in TINY:
            yield Case(
                "rule",
                f"{shape} * 2^{down}",
                lambda a=shape, d=down: outputs(s, *a, scale_log2=d),
                lambda a=shape, d=down: references(s, *a, scale_log2=d),
            )
    m = 20 if s.device == "interpreter" else 260
    x, positions, cos, sin = operands(s, m, 3, 16)
    y = rope.apply(x, positions, cos, sin)
    for count in (c for c in s.rows if c <= m):
        for a in sorted({0, m // 3, m - count} & set(range(m - count + 1))):
            own = slice(a, a + count)
            yield Case("rows", f"M={count} at {a}", lambda o=own: rope.apply(x[o], positions[o], cos, sin), lambda o=own: y[o])
    for rank in range(3):
        yield Case(
            "rows", f"every third row, rank {rank}", lambda r=rank: rope.apply(x[r::3], positions[r::3], cos, sin), lambda r=rank: y[r::3]
        )
    for a, b in ((0, 1), (1, 3)):
        yield Case(
            "columns", f"heads {a}:{b}", lambda o=slice(a, b): rope.apply(x[:, o], positions, cos, sin), lambda o=slice(a, b): y[:, o]
        )
    yield Case("padding", "x inside NaN", lambda: rope.apply(s.framed(x), positions, cos, sin), lambda: y)
    for shape in ((1, 2, 16), (9, 3, 70)) if s.small else ((1, 16, 128), (200, 3, 70)):
        yield from s.circumstances(f"{shape}", lambda s, a=shape: outputs(s, *a))
    yield from s.flush_to_zero("numbers of 2^-135", lambda s: outputs(s, 9, 3, 16, -135))


def operands(s: Setting, m: int, heads: int, d: int, scale_log2: int = 0) -> list[Tensor]:
    """x [M,H,D], positions [M], cos and sin [2M,D/2]: the reference's, so that every device turns by the same tables."""
    x, positions = s.values(m, heads, d, seed=1, scale_log2=scale_log2), s.on(torch.arange(m) * 37 % (2 * m))
    return [x, positions, *(s.on(t) for t in rope.tables(d, 2 * m, THETA))]


def outputs(s: Setting, m: int, heads: int, d: int, scale_log2: int = 0) -> list[Tensor]:
    x, positions, cos, sin = operands(s, m, heads, d, scale_log2)
    return [rope.apply(x, positions, cos, sin, inverse) for inverse in (False, True)]


def references(s: Setting, m: int, heads: int, d: int, scale_log2: int) -> list[Tensor]:
    x, positions, cos, sin = host(*operands(s, m, heads, d, scale_log2))
    return [s.store(rope.apply_reference(x, positions, cos, sin, inverse)) for inverse in (False, True)]

"""Rotary position embedding, in the "rotate half" convention of Hugging Face models (Su et al., "RoFormer", 2021).

Element i of the first half of a head turns with element i of the second half, by the angle position * theta^(-2 i / D).
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import torch
from torch import Tensor

from kernels.cpu import build
from kernels.elementwise import fma_reference

_TWO_PI = Decimal("6.28318530717958647692528676655900576839433879875021164194988918461563281257241799725606965068423413596")


def tables(head_dim: int, max_position: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos, sin: fp32 [max_position, head_dim / 2], computed in fp64 and rounded once.

    Frequencies come from `decimal` (software), cosines from our own series: no libm, so the same bits on every machine.
    """
    half, turns = head_dim // 2, _turns(head_dim, theta)
    cos, sin = (torch.empty(max_position, half, dtype=torch.float32) for _ in range(2))
    build.library().rope_tables(turns, half, max_position, cos, sin)
    return cos, sin


def _turns(head_dim: int, theta: float) -> Tensor:
    """theta^(-2 i / head_dim) / 2 pi for each i < head_dim / 2, rounded once to fp64."""
    if head_dim % 2 or theta <= 0:
        raise ValueError(f"rope: head_dim {head_dim}, theta {theta}")
    with localcontext() as context:
        context.prec = 60
        log_theta = Decimal(theta).ln()
        turns = [float((log_theta * -2 * i / head_dim).exp() / _TWO_PI) for i in range(head_dim // 2)]
    return torch.tensor(turns, dtype=torch.float64)


def apply(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """x fp32 [M, H, D] turned by the tables' rows `positions` int64 [M]; `inverse` turns back (the backward pass). New tensor.

    first' = fma(first, c, -(second * s)), second' = fma(second, c, first * s); stride(2) == 1, other strides free.
    IndexError when a position has no row in the tables.
    """
    if x.dtype != torch.float32 or x.stride(2) != 1 or x.shape[2] != 2 * cos.shape[1] or len(positions) != len(x):
        raise ValueError(f"rope: x {x.dtype} {tuple(x.shape)}, positions {tuple(positions.shape)}, tables {tuple(cos.shape)}")
    num_rows, num_heads, head_dim = x.shape
    positions, cos, sin = positions.to(torch.int64).contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    bad = build.library().rope_apply(
        x, x.stride(0), x.stride(1), num_rows, num_heads, head_dim // 2, positions, cos, sin,
        len(cos), int(inverse), out,
    )  # fmt: skip
    if bad:
        raise IndexError(f"rope: a position lies outside the tables of {len(cos)} rows")
    return out


# --- references --------------------------------------------------------------------------------------------------------------
def apply_reference(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """`apply` in plain torch on any device, bit for bit; positions are not checked."""
    c, s = (t[positions][:, None, :] for t in (cos, -sin if inverse else sin))
    first, second = x.chunk(2, dim=2)
    return torch.cat([fma_reference(first, c, -(second * s)), fma_reference(second, c, first * s)], dim=2)


def tables_reference(head_dim: int, max_position: int, theta: float) -> tuple[Tensor, Tensor]:
    """`tables` in plain torch, bit for bit: for machines without a compiler. The series are those of cpu/vmath_extra.h."""
    magic = 6755399441055744.0  # 1.5 * 2^52: adding it rounds to the nearest integer, ties to even
    turns = torch.arange(max_position, dtype=torch.float64)[:, None] * _turns(head_dim, theta)
    quarters = turns * 4.0
    shifted = quarters + magic
    quadrant = shifted.view(torch.int64) & 3
    a = (quarters - (shifted - magic)) * 1.5707963267948966
    z = a * a
    sine = a + a * (z * _series(z, (17, 15, 13, 11, 9, 7, 5, 3)))
    cosine = 1.0 + z * _series(z, (16, 14, 12, 10, 8, 6, 4, 2))
    odd, negative = (quadrant & 1).bool(), (quadrant & 2).bool()
    first, second = torch.where(odd, sine, cosine), torch.where(odd, cosine, sine)
    return torch.where(odd ^ negative, -first, first).float(), torch.where(negative, -second, second).float()


def _series(z: Tensor, factorials: tuple[int, ...]) -> Tensor:
    """Taylor's series in z, an even number of terms with alternating signs, highest power first; the first term is positive."""
    p = torch.zeros_like(z)
    for i, n in enumerate(factorials):
        p = p * z + (-1.0) ** i / math.factorial(n)
    return p

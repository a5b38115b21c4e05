"""Rotary position embedding, in the "rotate half" convention of Hugging Face models (Su et al., "RoFormer", 2021).

Element i of the first half of a head turns with element i of the second half, by the angle position * theta^(-2 i / D).
"""

from __future__ import annotations

import functools
import math
from decimal import Decimal, localcontext

import torch
from torch import Tensor

from kernels import device
from kernels.cpu import build
from kernels.elementwise import fma_reference

_TWO_PI = Decimal("6.28318530717958647692528676655900576839433879875021164194988918461563281257241799725606965068423413596")


@functools.lru_cache(maxsize=8)
def tables(head_dim: int, max_position: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos, sin: fp32 [max_position, head_dim / 2] in main memory, computed in fp64 and rounded once. Not to be written to: they are shared.

    Frequencies come from `decimal` (software), cosines from our own series: no libm, so the same bits on every machine.
    """
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
    """x [M, H, D], fp32 or bf16, turned by the fp32 tables' rows `positions` int [M]; `inverse` turns back (the backward pass). New tensor.

    first' = fma(first, c, -(second * s)), second' = fma(second, c, first * s); stride(2) == 1, other strides free. bf16 results are
    rounded once. IndexError when a position has no row in the tables.
    """
    (num_rows, num_heads, head_dim), strides, dtype, table = x.shape, x.stride(), x.dtype, cos.shape
    right = (dtype is torch.float32 or dtype is torch.bfloat16) and strides[2] == 1 and positions.numel() == num_rows
    if not right or head_dim != 2 * table[1] or sin.shape != table or cos.dtype is not torch.float32 or sin.dtype is not torch.float32:
        raise ValueError(f"rope: x {dtype} {tuple(x.shape)}, positions {tuple(positions.shape)}, tables {cos.dtype} {tuple(table)}")
    if device.on_gpu(x, positions, cos, sin):
        from kernels.gpu import rope as gpu

        return gpu.apply(x, positions, cos, sin, inverse)
    if positions.dtype is not torch.int64:
        positions = positions.to(torch.int64)
    positions, cos, sin = positions.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    bad = build.library().rope_apply(
        dtype is torch.bfloat16, x.data_ptr(), strides[0], strides[1], num_rows, num_heads, table[1], positions.data_ptr(),
        cos.data_ptr(), sin.data_ptr(), table[0], inverse, out.data_ptr(),
    )  # fmt: skip
    if bad:
        raise IndexError(f"rope: a position lies outside the tables of {table[0]} rows")
    return out


# --- references --------------------------------------------------------------------------------------------------------------
def apply_reference(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """`apply` in plain torch on any device, bit for bit, for fp32 x; positions are not checked."""
    c, s = (t[positions][:, None, :] for t in (cos, -sin if inverse else sin))
    first, second = x.chunk(2, dim=2)
    return torch.cat([fma_reference(first, c, -(second * s)), fma_reference(second, c, first * s)], dim=2)

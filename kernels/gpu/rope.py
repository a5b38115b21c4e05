"""Rotary position embedding; see `kernels.rope`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import math


@triton.jit
def apply_kernel(
    x_ptr, positions_ptr, cos_ptr, sin_ptr, out_ptr, bad_ptr, heads, half, table_rows, x_row, x_head,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One row, HEADS of its heads."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row)
    inside = (position >= 0) & (position < table_rows)
    if not inside:
        tl.store(bad_ptr, 1)
    h, i = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    table = tl.where(inside, position, 0) * half + i
    c = tl.load(cos_ptr + table, mask=i < half, other=0.0)[None, :]
    s = tl.load(sin_ptr + table, mask=i < half, other=0.0)[None, :]
    if INVERSE:
        s = -s
    mask = (h < heads)[:, None] & (i < half)[None, :]
    x = x_ptr + row * x_row + h.to(tl.int64)[:, None] * x_head + i[None, :]
    first, second = tl.load(x, mask=mask, other=0.0).to(tl.float32), tl.load(x + half, mask=mask, other=0.0).to(tl.float32)
    c, s = tl.broadcast_to(c, (HEADS, HALF)), tl.broadcast_to(s, (HEADS, HALF))
    out = out_ptr + (row * heads + h)[:, None] * (2 * half) + i[None, :]
    tl.store(out, math.stored(math.fma(first, c, -(second * s)), out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + half, math.stored(math.fma(second, c, first * s), out_ptr.dtype.element_ty), mask=mask)


def apply(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """x [M, H, D] turned by the tables' rows. IndexError for a position outside, which is read back, but not while a graph is recorded."""
    (rows, heads, _), half = x.shape, x.shape[2] // 2
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    bad, block = torch.zeros(1, dtype=torch.int32, device=x.device), 4
    apply_kernel[(rows, triton.cdiv(heads, block))](
        x, positions.contiguous(), cos.contiguous(), sin.contiguous(), out, bad, heads, half, len(cos), x.stride(0), x.stride(1),
        INVERSE=inverse, HEADS=block, HALF=triton.next_power_of_2(half), num_warps=1, **math.LAUNCH,
    )  # fmt: skip
    if math.may_read_back(x) and int(bad):
        raise IndexError(f"rope: a position lies outside the tables of {len(cos)} rows")
    return out


def compile_cases() -> list:
    from kernels.gpu.ahead_of_time import Case

    cases = []
    for kind in ("fp32", "bf16"):
        pointers = {
            "x_ptr": f"*{kind}",
            "positions_ptr": "*i64",
            "cos_ptr": "*fp32",
            "sin_ptr": "*fp32",
            "out_ptr": f"*{kind}",
            "bad_ptr": "*i32",
        }
        signature = pointers | dict.fromkeys(("heads", "half", "table_rows", "x_row", "x_head"), "i32")
        constexprs = {"INVERSE": False, "HEADS": 4, "HALF": 64}
        cases.append(Case(apply_kernel, kind, signature, constexprs, (*pointers, "half", "x_row", "x_head"), {"num_warps": 1}))
    return cases

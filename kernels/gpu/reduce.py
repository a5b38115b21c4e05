"""Fixed-point conversion and the pieces of the exact norm: integers, so no order of blocks or atomics matters."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import math

_BLOCK = 1024
_LIMB_BITS = 28


@triton.jit
def to_fixed_kernel(x_ptr, out_ptr, bad_ptr, count, scale_log2, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < count, other=0.0)
    fits = tl.abs(x).to(tl.float64) < ((tl.full((BLOCK,), 1023 + 61, tl.int64) - scale_log2) << 52).to(tl.float64, bitcast=True)
    tl.store(out_ptr + i, math.fixed(tl.where(fits, x, 0.0), scale_log2), mask=i < count)
    if tl.max(tl.where(fits, 0, 1), 0) != 0:
        tl.store(bad_ptr, 1)


@triton.jit
def from_fixed_kernel(acc_ptr, out_ptr, bad_ptr, divisor_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.load(acc_ptr + i, mask=i < count, other=0)
    divisor = tl.load(divisor_ptr + tl.zeros((BLOCK,), tl.int32))
    tl.store(out_ptr + i, (acc.to(tl.float64) / divisor).to(tl.float32), mask=i < count)  # fp64 division is always IEEE
    if tl.max(tl.where(math.sum_fits(acc), 0, 1), 0) != 0:
        tl.store(bad_ptr, 1)


@triton.jit
def max_bits_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(x_ptr + i, mask=i < count, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(out_ptr, tl.max(bits, 0))


@triton.jit
def square_limbs_kernel(x_ptr, limbs_ptr, count, scale_log2, BLOCK: tl.constexpr):
    """scale_log2: x^2 * 2^scale_log2 < 2^28."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < count, other=0.0).to(tl.float64)
    scale = ((tl.full((BLOCK,), 1023, tl.int64) + scale_log2) << 52).to(tl.float64, bitcast=True)
    square = x * x * scale  # exact: 48 bits
    whole = square.to(tl.int64)
    rest = (square - whole.to(tl.float64)) * 268435456.0
    magic = tl.full((BLOCK,), 6755399441055744.0, tl.float64)
    low = (rest + magic).to(tl.int64, bitcast=True) - 0x4338000000000000
    tl.atomic_add(limbs_ptr, tl.sum(whole, 0))
    tl.atomic_add(limbs_ptr + 1, tl.sum(low, 0))


def _grid(count: int) -> tuple[int]:
    return (triton.cdiv(count, _BLOCK),)


def to_fixed(x: Tensor, scale_log2: int) -> Tensor:
    """int64(round_half_even(x * 2^scale_log2)); see `kernels.reduce.to_fixed`. Waits for the GPU."""
    x, bad = x.contiguous(), torch.zeros(1, dtype=torch.int32, device=x.device)
    out = torch.empty(x.shape, dtype=torch.int64, device=x.device)
    if x.numel():
        to_fixed_kernel[_grid(x.numel())](x, out, bad, x.numel(), scale_log2, BLOCK=_BLOCK, **math.LAUNCH)
    if int(bad):
        raise OverflowError(f"a value is too large for fixed point with scale 2^{scale_log2}")
    return out


def from_fixed(acc: Tensor, scale_log2: int, divisor: float = 1.0) -> Tensor:
    """fp32(acc / (2^scale_log2 * divisor)); see `kernels.reduce.from_fixed`. Waits for the GPU."""
    acc, bad = acc.contiguous(), torch.zeros(1, dtype=torch.int32, device=acc.device)
    out = torch.empty(acc.shape, dtype=torch.float32, device=acc.device)
    if acc.numel():
        by = torch.tensor([2.0**scale_log2 * divisor], dtype=torch.float64, device=acc.device)  # an fp64 argument would be passed as fp32
        from_fixed_kernel[_grid(acc.numel())](acc, out, bad, by, acc.numel(), BLOCK=_BLOCK, **math.LAUNCH)
    if int(bad):
        raise OverflowError(f"an exact sum left the range of 62 bits (scale 2^{scale_log2})")
    return out


def max_bits(x: Tensor) -> int:
    """Bits of the largest magnitude of fp32 x; those of infinities and NaN are the largest. 0 when empty. Waits for the GPU."""
    x, out = x.contiguous(), torch.zeros(1, dtype=torch.int32, device=x.device)
    if x.numel():
        max_bits_kernel[_grid(x.numel())](x, out, x.numel(), BLOCK=_BLOCK, **math.LAUNCH)
    return int(out)


def add_square_limbs(x: Tensor, exponent: int, limbs: Tensor) -> None:
    """limbs int64 [2] on x's device += the pieces of the sum of x^2; see `kernels.reduce.square_limbs`."""
    x = x.contiguous()
    if x.numel():
        square_limbs_kernel[_grid(x.numel())](x, limbs, x.numel(), _LIMB_BITS - 2 * exponent, BLOCK=_BLOCK, **math.LAUNCH)


def compile_cases() -> list:
    from kernels.gpu.ahead_of_time import Case

    kernels = (
        (to_fixed_kernel, {"x_ptr": "*fp32", "out_ptr": "*i64", "bad_ptr": "*i32", "count": "i32", "scale_log2": "i32"}),
        (from_fixed_kernel, {"acc_ptr": "*i64", "out_ptr": "*fp32", "bad_ptr": "*i32", "divisor_ptr": "*fp64", "count": "i32"}),
        (max_bits_kernel, {"x_ptr": "*fp32", "out_ptr": "*i32", "count": "i32"}),
        (square_limbs_kernel, {"x_ptr": "*fp32", "limbs_ptr": "*i64", "count": "i32", "scale_log2": "i32"}),
    )
    return [Case(kernel, "flat", signature, {"BLOCK": _BLOCK}, (*list(signature)[:2], "count")) for kernel, signature in kernels]

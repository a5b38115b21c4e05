"""Elementary functions on fp32 tensors with the same bits on every machine: IEEE operations in a fixed order, no libm.

Each takes fp32 of any shape and returns a new contiguous tensor. Errors against fp64: exp and log about 1 ulp, silu and rsqrt about 2 ulp;
sqrt is correctly rounded. The `*_reference` functions have the same bits on any device and need no compiler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import device
from kernels.cpu import build


def exp(x: Tensor) -> Tensor:
    return _unary("exp", x)


def log(x: Tensor) -> Tensor:
    """Natural logarithm."""
    return _unary("log", x)


def sqrt(x: Tensor) -> Tensor:
    return _unary("sqrt", x)


def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x), both operations rounded."""
    return _unary("rsqrt", x)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))."""
    return _unary("silu", x)


def _unary(function: str, x: Tensor) -> Tensor:
    if x.dtype is not torch.float32:
        raise ValueError(f"elementwise.{function}: expected fp32, got {x.dtype}")
    if device.on_gpu(x):
        from kernels.gpu import elementwise as gpu

        return getattr(gpu, function)(x)
    x = x.contiguous()
    y = torch.empty_like(x)
    getattr(build.library(), f"elementwise_{function}")(x.data_ptr(), y.data_ptr(), x.numel())
    return y


# --- references --------------------------------------------------------------------------------------------------------------
def fma_reference(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c with one rounding, for fp32 tensors: the product is exact in fp64, and the sum is rounded to odd there
    (Boldo and Melquiond, "When double rounding is odd", 2005), which makes the second rounding, to fp32, the only one that counts."""
    p, q = torch.broadcast_tensors(a.double() * b.double(), c.double())
    s = p + q
    t = s - p
    error = (p - (s - t)) + (q - t)  # exact (Knuth's two-sum)
    inexact = (error != 0) & (s.view(torch.int64) & 1 == 0)
    toward = torch.where(error > 0, torch.full_like(s, float("inf")), torch.full_like(s, float("-inf")))
    return torch.where(inexact, torch.nextafter(s, toward), s).float()


def exp_reference(x: Tensor) -> Tensor:
    """`exp` in plain torch on any device, bit for bit (a NaN may have another payload). The polynomials are those of cpu/vmath.h."""
    magic = 12582912.0  # 1.5 * 2^23: adding it rounds to the nearest integer, ties to even
    x = torch.where(x > 89.0, 89.0, x)
    x = torch.where(x < -104.0, -104.0, x)
    t = _fma(x, _LOG2_E, magic)
    n, e = t - magic, t.view(torch.int32) - 0x4B400000
    r = _fma(n, -_LN2_LOW, _fma(n, -_LN2_HIGH, x))
    p = _fma(r * r, _polynomial(_EXP, r), r) + 1.0
    half = e >> 1
    return p * _power_of_two(half) * _power_of_two(e - half)


def log_reference(x: Tensor) -> Tensor:
    """`log` in plain torch on any device, bit for bit."""
    small = x < 2.0**-126
    shifted = torch.where(small, x * 2.0**23, x).view(torch.int32) - 0x3F3504F3
    f = ((shifted & 0x007FFFFF) + 0x3F3504F3).view(torch.float32) - 1.0
    k = ((shifted >> 23) - small.to(torch.int32) * 23).float()
    square = f * f
    low = _fma(k, _LN2_LOW, _fma(f * _polynomial(_LOG, f), square, -0.5 * square))
    result = _fma(k, _LN2_HIGH, f + low)
    result = torch.where(x < torch.inf, result, x)
    result = torch.where(x < 0.0, torch.nan, result)
    return torch.where(x == 0.0, -torch.inf, result)


def sqrt_reference(x: Tensor) -> Tensor:
    """By way of fp64: torch.sqrt of fp32 is not correctly rounded everywhere. No square root of an fp32 number lies so near the middle
    of two others that an error of an fp64 ulp could matter."""
    return x.double().sqrt().float()


def rsqrt_reference(x: Tensor) -> Tensor:
    return torch.ones_like(x) / sqrt_reference(x)


def silu_reference(x: Tensor) -> Tensor:
    return x / (1.0 + exp_reference(-x))


_LOG2_E, _LN2_HIGH, _LN2_LOW = map(float.fromhex, ("0x1.715476p+0", "0x1.62e4p-1", "0x1.7f7d1cp-20"))
_EXP = ("0x1.a151bcp-13", "0x1.6d4366p-10", "0x1.1110c6p-7", "0x1.5554e8p-5", "0x1.555556p-3", "0x1p-1")
_LOG = (
    "0x1.24db16p-4", "-0x1.da07dap-4", "0x1.ddafbap-4", "-0x1.fc5932p-4", "0x1.23d640p-3", "-0x1.555ee0p-3", "0x1.999d52p-3",
    "-0x1.fffff2p-3", "0x1.555554p-2",
)  # fmt: skip


def _fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    return fma_reference(a, *(t if isinstance(t, Tensor) else torch.full_like(a, t) for t in (b, c)))


def _polynomial(coefficients: tuple[str, ...], x: Tensor) -> Tensor:
    """Horner's scheme, one FMA a step; highest power first."""
    first, *rest = map(float.fromhex, coefficients)
    p = torch.full_like(x, first)
    for c in rest:
        p = _fma(p, x, c)
    return p


def _power_of_two(e: Tensor) -> Tensor:
    return ((e + 127) << 23).view(torch.float32)

"""What every Triton kernel is built from: IEEE operations, elementary functions and the dot product, with the bits of the CPU kernels.

Triton must not contract a * b + c, divide approximately or flush subnormal numbers: kernels are launched with `LAUNCH`, and take `div`,
`sqrt` and the functions below from here. Polynomials are those of kernels/cpu/vmath.h.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
LAUNCH = {"enable_fp_fusion": False}  # options of every launch


def may_read_back(tensor: Tensor) -> bool:
    """Whether a flag may be read on the host: not while a CUDA graph is being recorded, where nothing may wait for the GPU."""
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


@triton.jit
def fma(a, b, c):
    """a * b + c with one rounding."""
    return tl.fma(a, b, c)


@triton.jit
def div(a, b):
    """a / b, correctly rounded."""
    return tl.div_rn(a, b)


@triton.jit
def sqrt(x):
    """Correctly rounded."""
    return tl.sqrt_rn(x)


@triton.jit
def root_f64(x):
    """Square root of fp64, which has only the correctly rounded instruction."""
    return tl.sqrt(x)


@triton.jit
def rsqrt(x):
    """1 / sqrt(x), both operations rounded."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
def maximum(a, b):
    """A NaN in `b` is dropped, a NaN in `a` is kept."""
    return tl.where(a < b, b, a)


@triton.jit
def exp(x):
    """Subnormal results are right; exp(x > 88.7228) is inf, exp(x < -103.98) is 0, NaN stays NaN."""
    magic = 12582912.0  # 1.5 * 2^23: adding it rounds to the nearest integer, ties to even
    x = tl.where(x > 89.0, 89.0, x)
    x = tl.where(x < -104.0, -104.0, x)
    t = tl.fma(x, 1.4426950216293335, magic)
    n = t - magic
    e = t.to(tl.int32, bitcast=True) - 0x4B400000
    r = tl.fma(n, -0.693145751953125, x)  # n * this part of log 2 is exact
    r = tl.fma(n, -1.428606765330187e-06, r)
    p = tl.fma(r, 0.0001989933371078223, 0.001393368816934526)
    p = tl.fma(p, r, 0.0083332983776927)
    p = tl.fma(p, r, 0.041666463017463684)
    p = tl.fma(p, r, 0.1666666716337204)
    p = tl.fma(p, r, 0.5)
    p = tl.fma(r * r, p, r) + 1.0
    half = e >> 1  # 2^n in two exact steps: one rounding even where the result is subnormal, inf where it is too large
    return p * ((half + 127) << 23).to(tl.float32, bitcast=True) * ((e - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def log(x):
    """Natural logarithm: log(0) is -inf, log(x < 0) is NaN, subnormal arguments are right."""
    small = x < 1.1754943508222875e-38
    y = tl.where(small, x * 8388608.0, x)
    shifted = y.to(tl.int32, bitcast=True) - 0x3F3504F3
    e = shifted >> 23  # y = 2^e * (1 + f), 1 + f in [sqrt(1/2), sqrt(2))
    f = ((shifted & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    k = (e - tl.where(small, 23, 0)).to(tl.float32)
    p = tl.fma(f, 0.07149799913167953, -0.11573014408349991)
    p = tl.fma(p, f, 0.11662266403436661)
    p = tl.fma(p, f, -0.12410850077867508)
    p = tl.fma(p, f, 0.14249849319458008)
    p = tl.fma(p, f, -0.16668486595153809)
    p = tl.fma(p, f, 0.2000070959329605)
    p = tl.fma(p, f, -0.24999989569187164)
    p = tl.fma(p, f, 0.3333333134651184)
    square = f * f
    low = tl.fma(k, 1.428606765330187e-06, tl.fma(f * p, square, -0.5 * square))
    result = tl.fma(k, 0.693145751953125, f + low)
    result = tl.where(x < float("inf"), result, x)  # inf and NaN pass through
    result = tl.where(x < 0.0, float("nan"), result)
    return tl.where(x == 0.0, float("-inf"), result)


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def silu(x):
    """x / (1 + exp(-x))."""
    return tl.div_rn(x, 1.0 + exp(-x))


@triton.jit
def dot(a, b, acc):
    """acc [M, N] + a [M, K] @ b [K, N], one FMA chain over k that continues acc. Operands fp32 or bf16 (widened exactly), acc fp32.

    On a GPU: fp32 by FMA instructions, bf16 by the tensor cores, whose order inside one instruction is the hardware's. The interpreter's
    own dot is a BLAS call in an unknown order, so there the chain is spelled out.
    """
    if INTERPRETED:
        a, b = a.to(tl.float32).to(tl.int32, bitcast=True), b.to(tl.float32).to(tl.int32, bitcast=True)  # integers: a sum would lose -0
        k = tl.arange(0, a.shape[1])
        for i in tl.static_range(a.shape[1]):
            column = tl.sum(tl.where(k[None, :] == i, a, 0), axis=1).to(tl.float32, bitcast=True)
            row = tl.sum(tl.where(k[:, None] == i, b, 0), axis=0).to(tl.float32, bitcast=True)
            acc = tl.fma(tl.broadcast_to(column[:, None], acc.shape), tl.broadcast_to(row[None, :], acc.shape), acc)
        return acc
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def stored(v, dtype: tl.constexpr):
    """fp32 v as it is stored: itself, or bf16 rounded to nearest even (the interpreter's own cast truncates, and flushes
    subnormal numbers)."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = v.to(tl.int32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        quiet = bits | 0x00400000  # a NaN stays one
        return (tl.where(v == v, rounded, quiet) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return v.to(dtype)


@triton.jit
def fixed(v, scale_log2):
    """int64(round_half_even(v * 2^scale_log2)) of fp32 v, for |v| * 2^scale_log2 < 2^61 (see kernels/cpu/fixed_point.h)."""
    scale = ((tl.full(v.shape, 1023, tl.int64) + scale_log2) << 52).to(tl.float64, bitcast=True)
    d = v.to(tl.float64) * scale
    magic = tl.full(v.shape, 6755399441055744.0, tl.float64)  # 1.5 * 2^52: adding it rounds |x| < 2^51 to an integer, ties to even
    high = d * 9.094947017729282e-13 + magic  # in units of 2^40, exact
    low = d - (high - magic) * 1099511627776.0
    bits = high.to(tl.int64, bitcast=True) - 0x4338000000000000
    return (bits << 40) + ((low + magic).to(tl.int64, bitcast=True) - 0x4338000000000000)


@triton.jit
def sum_fits(acc):
    """|acc| < 2^62 of int64: such a sum cannot have wrapped round."""
    return (acc > -4611686018427387904) & (acc < 4611686018427387904)


@triton.jit
def add_fixed(acc, v, mask, scale_log2, bad_ptr):
    """acc (int64 pointers) += fixed(v) by atomic additions, where `mask`; *bad_ptr = 1 when a value or a sum was too large."""
    limit = ((tl.full(v.shape, 1023 + 61, tl.int64) - scale_log2) << 52).to(tl.float64, bitcast=True)  # 2^(61 - scale)
    fits = tl.abs(v).to(tl.float64) < limit  # false for NaN
    add = tl.where(fits, fixed(tl.where(fits, v, 0.0), scale_log2), 0)
    before = tl.atomic_add(acc, add, mask=mask)
    bad = tl.where(mask & ~(fits & sum_fits(before + add)), 1, 0)
    if tl.max(bad, 0) != 0:
        tl.store(bad_ptr, 1)

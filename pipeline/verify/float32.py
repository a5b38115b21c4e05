"""fp32 arithmetic on Python's doubles: single IEEE operations, each rounded once, and the exponential of the kernels, bit for bit.

A sum, product or quotient of two fp32 numbers, computed as a double and rounded to fp32, is correctly rounded (Figueroa, "When is double
rounding innocuous?", 1995: 53 >= 2 * 24 + 2).
"""

from __future__ import annotations

import math
import struct

LOG2_E, LN2_HIGH, LN2_LOW = map(float.fromhex, ("0x1.715476p+0", "0x1.62e4p-1", "0x1.7f7d1cp-20"))
EXP = tuple(map(float.fromhex, ("0x1.a151bcp-13", "0x1.6d4366p-10", "0x1.1110c6p-7", "0x1.5554e8p-5", "0x1.555556p-3", "0x1p-1")))
MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to the nearest integer, ties to even


def fp32(x: float) -> float:
    """Rounded to the nearest fp32 number, ties to even."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def fma(a: float, b: float, c: float) -> float:
    """a * b + c with one rounding. The product is exact; the sum is rounded to odd in fp64, which makes the rounding to fp32 the only one
    that counts (Boldo and Melquiond, "When double rounding is odd", 2005)."""
    p = a * b
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)  # exact (Knuth's two-sum)
    if error and not struct.unpack("<Q", struct.pack("<d", s))[0] & 1:
        s = math.nextafter(s, math.copysign(math.inf, error))
    return fp32(s)


def exp(x: float) -> float:
    """The kernels' exponential of an fp32 number."""
    x = min(89.0, max(-104.0, x))
    t = fma(x, LOG2_E, MAGIC)
    n = fp32(t - MAGIC)
    e = int(n)
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
    q = EXP[0]
    for coefficient in EXP[1:]:
        q = fma(q, r, coefficient)
    p = fp32(fma(fp32(r * r), q, r) + 1.0)
    half = e >> 1
    return fp32(fp32(p * 2.0**half) * 2.0 ** (e - half))

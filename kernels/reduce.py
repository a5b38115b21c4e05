"""Sums whose bits do not depend on who adds what: fixed trees, and exact integer sums.

* Halving tree over n numbered leaves: node(lo, hi) = node(lo, mid) + node(mid, hi), mid = (lo + hi) // 2. The shape of a subtree depends
  only on hi - lo. A rank that holds leaves [a, b) contributes its maximal nodes, and anyone can finish the top.
* Aligned tree: over blocks of a power of two leaves, absent leaves skipped. Nodes never change when leaves are appended.
* Exact: int64(round_half_even(v * 2^scale)) is added as integers. Integer addition is associative, so any order and
  placement give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from kernels import device
from kernels.cpu import build

Value = TypeVar("Value")
Node = tuple[int, int]

# Elements that one exact norm may hold: each adds less than 2^28 to a limb, and limbs stay below 2^62.
MAX_SQUARES = 1 << 34
_LIMB_BITS = 28
_NOT_FINITE = 129  # no finite fp32 has this exponent


# --- trees -------------------------------------------------------------------------------------------------------------------
def nodes(n: int, a: int, b: int) -> list[Node]:
    """Maximal nodes (lo, hi) of the halving tree over n leaves that lie inside [a, b), in order."""

    def walk(lo: int, hi: int) -> list[Node]:
        if hi <= a or b <= lo:
            return []
        if a <= lo and hi <= b:
            return [(lo, hi)]
        mid = (lo + hi) // 2
        return walk(lo, mid) + walk(mid, hi)

    return walk(0, n) if n > 0 else []


def halving(lo: int, hi: int, leaf: Callable[[int], Value], merge: Callable[[Value, Value], Value] = torch.add) -> Value:
    """Value of node (lo, hi) from its leaves; at most log2(hi - lo) + 1 values are alive at a time. hi > lo."""
    if hi - lo == 1:
        return leaf(lo)
    mid = (lo + hi) // 2
    left = halving(lo, mid, leaf, merge)
    return merge(left, halving(mid, hi, leaf, merge))


def combine(parts: Mapping[Node, Value], n: int, merge: Callable[[Value, Value], Value] = torch.add) -> Value:
    """Root of the halving tree over n leaves, from nodes that cover it exactly once. KeyError names a missing leaf."""

    def walk(lo: int, hi: int) -> Value:
        if (lo, hi) in parts:
            return parts[lo, hi]
        if hi - lo <= 1:
            raise KeyError(f"no partial sum covers leaf {lo} of {n}")
        mid = (lo + hi) // 2
        left = walk(lo, mid)
        return merge(left, walk(mid, hi))

    return walk(0, n)


def aligned(leaves: Mapping[int, Value], merge: Callable[[Value, Value], Value] = torch.add) -> Value:
    """Root of the power-of-two-aligned tree over the leaves that are present (at least one); a lone child passes through unchanged."""

    def walk(lo: int, size: int) -> Value | None:
        if size == 1:
            return leaves.get(lo)
        a, b = walk(lo, size // 2), walk(lo + size // 2, size // 2)
        return b if a is None else a if b is None else merge(a, b)

    root = walk(0, 1 << max(leaves).bit_length())
    assert root is not None
    return root


# --- exact sums --------------------------------------------------------------------------------------------------------------
def to_fixed(x: Tensor, scale_log2: int) -> Tensor:
    """int64(round_half_even(x * 2^scale_log2)) of fp32 x, same shape. OverflowError when a magnitude reaches 2^61 or is not finite."""
    if x.dtype is not torch.float32:
        raise ValueError(f"to_fixed: expected fp32, got {x.dtype}")
    if device.on_gpu(x):
        from kernels.gpu import reduce as gpu

        return gpu.to_fixed(x, scale_log2)
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.int64)
    if build.library().reduce_to_fixed(x, out, x.numel(), 2.0**scale_log2):
        raise OverflowError(f"a value is too large for fixed point with scale 2^{scale_log2}")
    return out


def from_fixed(acc: Tensor, scale_log2: int, divisor: float = 1.0) -> Tensor:
    """fp32(acc / (2^scale_log2 * divisor)): one division in fp64, one rounding to fp32. int64 -> fp32, same shape.

    OverflowError when |acc| has reached 2^62: the sum may have wrapped round.
    """
    if acc.dtype is not torch.int64:
        raise ValueError(f"from_fixed: expected int64, got {acc.dtype}")
    if device.on_gpu(acc):
        from kernels.gpu import reduce as gpu

        return gpu.from_fixed(acc, scale_log2, divisor)
    acc = acc.contiguous()
    out = torch.empty(acc.shape, dtype=torch.float32)
    if build.library().reduce_from_fixed(acc, out, acc.numel(), 2.0**scale_log2 * divisor):
        raise OverflowError(f"an exact sum left the range of 62 bits (scale 2^{scale_log2})")
    return out


def exact_sum(x: Tensor | Iterable[float]) -> float:
    """Correctly rounded fp64 sum, so independent of order (Shewchuk's method, `math.fsum`). OverflowError when not finite."""
    values = x.reshape(-1).tolist() if isinstance(x, Tensor) else list(x)
    if not all(map(math.isfinite, values)):
        raise OverflowError("an exact sum met a value that is not finite")
    return math.fsum(values)


def max_exponent(tensors: Sequence[Tensor]) -> int:
    """Smallest e with |x| < 2^e for every fp32 element (-149 when all are zero, 129 when one is not finite).

    Ranks take the MAX of their exponents, then all call `square_limbs` with it: a non-finite value raises on every rank.
    """
    exponent = -149
    for t in tensors:
        bits = _max_bits(t)
        if bits >= 0x7F800000:
            return _NOT_FINITE
        # From the bits: Python's own conversion of a subnormal number would give 0 while somebody else has set flush-to-zero.
        exponent = max(exponent, (bits >> 23) - 126 if bits >> 23 else bits.bit_length() - 149)
    return exponent


def square_limbs(tensors: Sequence[Tensor], exponent: int) -> Tensor:
    """int64[2], on the tensors' device: exact integer sums (high, low) of x^2 in units of 2^(2 * exponent - 28) and 2^(2 * exponent - 56).

    x * x is exact in fp64; what lies below the low limb is rounded element by element. Limbs of several ranks are added as integers.
    OverflowError when `exponent` reports a non-finite value or there are more than 2^34 elements.
    """
    if exponent >= _NOT_FINITE:
        raise OverflowError("a value is not finite")
    if sum(t.numel() for t in tensors) > MAX_SQUARES:
        raise OverflowError(f"more than {MAX_SQUARES} elements in one exact norm")
    limbs = torch.zeros(2, dtype=torch.int64, device=tensors[0].device if tensors else None)
    for t in tensors:
        _add_square_limbs(t, exponent, limbs)
    return limbs


def norm_from_limbs(limbs: Tensor, exponent: int) -> float:
    """Square root of the sum behind `limbs`, in fp64. OverflowError when a limb has reached 2^62."""
    high, low = (int(v) for v in limbs.tolist())
    if max(high, low) >= 1 << 62:
        raise OverflowError("the limbs of an exact norm overflowed")
    return math.ldexp(math.sqrt((high << _LIMB_BITS) + low), exponent - _LIMB_BITS)


# --- references --------------------------------------------------------------------------------------------------------------
def _max_bits(x: Tensor) -> int:
    """Bits of the largest magnitude; those of infinities and NaN are the largest."""
    if device.on_gpu(x):
        from kernels.gpu import reduce as gpu

        return gpu.max_bits(x)
    x = x.contiguous()
    return build.library().reduce_max_bits(x, x.numel())


def _add_square_limbs(x: Tensor, exponent: int, limbs: Tensor) -> None:
    if device.on_gpu(x, limbs):
        from kernels.gpu import reduce as gpu

        return gpu.add_square_limbs(x, exponent, limbs)
    x = x.contiguous()
    return build.library().reduce_square_limbs(x, x.numel(), 2.0 ** (_LIMB_BITS - 2 * exponent), limbs)


def to_fixed_reference(x: Tensor, scale_log2: int) -> Tensor:
    """`to_fixed` in plain torch on any device; `torch.round` rounds halves to even, and fp64 holds x * 2^scale exactly."""
    return torch.round(x.double() * 2.0**scale_log2).to(torch.int64)


def from_fixed_reference(acc: Tensor, scale_log2: int, divisor: float = 1.0) -> Tensor:
    """`from_fixed` in plain torch on any device."""
    return (acc.double() / (2.0**scale_log2 * divisor)).float()


def square_limbs_reference(tensors: Sequence[Tensor], exponent: int) -> Tensor:
    """`square_limbs` in plain torch, on the device of the tensors (at least one)."""
    limbs = []
    for t in tensors:
        square = t.double().square() * 2.0 ** (_LIMB_BITS - 2 * exponent)
        high = square.floor()
        limbs.append(torch.stack([high, torch.round((square - high) * 2.0**_LIMB_BITS)]).to(torch.int64).flatten(1).sum(1))
    return torch.stack(limbs).sum(0)

"""Elementary functions on fp32 tensors with the same bits on every machine: IEEE operations in a fixed order, no libm.

Each takes fp32 of any shape and returns a new contiguous tensor. Errors against fp64: exp and log about 1 ulp, silu and rsqrt about 2 ulp;
sqrt is correctly rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu import build


def exp(x: Tensor) -> Tensor:
    return _unary("elementwise_exp", x)


def log(x: Tensor) -> Tensor:
    """Natural logarithm."""
    return _unary("elementwise_log", x)


def sqrt(x: Tensor) -> Tensor:
    return _unary("elementwise_sqrt", x)


def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x), both operations rounded."""
    return _unary("elementwise_rsqrt", x)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))."""
    return _unary("elementwise_silu", x)


def _unary(function: str, x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise ValueError(f"{function}: expected fp32, got {x.dtype}")
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=torch.float32)
    getattr(build.library(), function)(x, y, x.numel())
    return y

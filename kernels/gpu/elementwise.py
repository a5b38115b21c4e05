"""Elementary functions of fp32 tensors; see `kernels.elementwise`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import math

_BLOCK = 1024
_FUNCTIONS = ("exp", "log", "sqrt", "rsqrt", "silu")


@triton.jit
def map_kernel(x_ptr, y_ptr, count, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < count, other=1.0)
    if FUNCTION == 0:
        y = math.exp(x)
    elif FUNCTION == 1:
        y = math.log(x)
    elif FUNCTION == 2:
        y = math.sqrt(x)
    elif FUNCTION == 3:
        y = math.rsqrt(x)
    else:
        y = math.silu(x)
    tl.store(y_ptr + i, y, mask=i < count)


def _map(function: str, x: Tensor) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        map_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, y, x.numel(), FUNCTION=_FUNCTIONS.index(function), BLOCK=_BLOCK, **math.LAUNCH)
    return y


def exp(x: Tensor) -> Tensor:
    return _map("exp", x)


def log(x: Tensor) -> Tensor:
    return _map("log", x)


def sqrt(x: Tensor) -> Tensor:
    return _map("sqrt", x)


def rsqrt(x: Tensor) -> Tensor:
    return _map("rsqrt", x)


def silu(x: Tensor) -> Tensor:
    return _map("silu", x)


def compile_cases() -> list:
    from kernels.gpu.ahead_of_time import Case

    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "count": "i32"}
    return [Case(map_kernel, name, signature, {"FUNCTION": i, "BLOCK": _BLOCK}, tuple(signature)) for i, name in enumerate(_FUNCTIONS)]

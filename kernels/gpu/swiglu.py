"""SwiGLU forward and backward, element by element; see `kernels.swiglu`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import math

_BLOCK = 1024


@triton.jit
def forward_kernel(gate_ptr, up_ptr, y_ptr, columns, gate_row, up_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + row * gate_row + i, mask=i < columns, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + i, mask=i < columns, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + i, math.stored(math.silu(gate) * up, y_ptr.dtype.element_ty), mask=i < columns)


@triton.jit
def backward_kernel(dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, columns, dy_row, gate_row, up_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + row * dy_row + i, mask=i < columns, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row + i, mask=i < columns, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + i, mask=i < columns, other=0.0).to(tl.float32)
    denominator = 1.0 + math.exp(-gate)
    s = math.div(1.0, denominator)
    dgate = (dy * up) * (s * math.fma(gate, 1.0 - s, 1.0))
    dup = dy * math.div(gate, denominator)
    tl.store(dgate_ptr + row * columns + i, math.stored(dgate, dgate_ptr.dtype.element_ty), mask=i < columns)
    tl.store(dup_ptr + row * columns + i, math.stored(dup, dup_ptr.dtype.element_ty), mask=i < columns)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """[M, F] x [M, F] -> [M, F]."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel():
        forward_kernel[_grid(y)](gate, up, y, y.shape[1], gate.stride(0), up.stride(0), BLOCK=_BLOCK, **math.LAUNCH)
    return y


def backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dgate, dup [M, F]."""
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    if dgate.numel():
        strides = dy.stride(0), gate.stride(0), up.stride(0)
        backward_kernel[_grid(dgate)](dy, gate, up, dgate, dup, dgate.shape[1], *strides, BLOCK=_BLOCK, **math.LAUNCH)
    return dgate, dup


def _grid(y: Tensor) -> tuple[int, int]:
    return len(y), triton.cdiv(y.shape[1], _BLOCK)


def compile_cases() -> list:
    from kernels.gpu.ahead_of_time import Case

    cases = []
    for kind in ("fp32", "bf16"):
        for kernel, tensors, numbers in (
            (forward_kernel, ("gate_ptr", "up_ptr", "y_ptr"), ("columns", "gate_row", "up_row")),
            (backward_kernel, ("dy_ptr", "gate_ptr", "up_ptr", "dgate_ptr", "dup_ptr"), ("columns", "dy_row", "gate_row", "up_row")),
        ):
            signature = dict.fromkeys(tensors, f"*{kind}") | dict.fromkeys(numbers, "i32")
            cases.append(Case(kernel, kind, signature, {"BLOCK": _BLOCK}, tuple(signature)))
    return cases

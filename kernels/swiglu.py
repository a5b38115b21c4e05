"""SwiGLU gate (Shazeer, "GLU variants improve transformer", 2020): silu(gate) * up, element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu import build
from kernels.elementwise import exp_reference, fma_reference, silu_reference


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """fp32 [M, F] x [M, F] -> [M, F]; rows may be strided. silu(g) = g / (1 + exp(-g))."""
    _check(gate, up)
    y = torch.empty(gate.shape, dtype=torch.float32)
    build.library().swiglu_forward(gate, gate.stride(0), up, up.stride(0), *gate.shape, y)
    return y


def backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dgate, dup fp32 [M, F], with s = 1 / (1 + exp(-gate)): dgate = (dy * up) * (s * fma(gate, 1 - s, 1)), dup = dy * silu(gate)."""
    _check(dy, gate, up)
    dgate, dup = (torch.empty(gate.shape, dtype=torch.float32) for _ in range(2))
    build.library().swiglu_backward(dy, dy.stride(0), gate, gate.stride(0), up, up.stride(0), *gate.shape, dgate, dup)
    return dgate, dup


def _check(*tensors: Tensor) -> None:
    for t in tensors:
        if t.dtype != torch.float32 or t.dim() != 2 or t.shape != tensors[0].shape or (t.numel() and t.stride(1) != 1):
            raise ValueError(f"swiglu: expected fp32 [M, F] with stride(1) == 1, got {t.dtype} {tuple(t.shape)}")


# --- references --------------------------------------------------------------------------------------------------------------
def forward_reference(gate: Tensor, up: Tensor) -> Tensor:
    """`forward` in plain torch on any device, bit for bit."""
    return silu_reference(gate) * up


def backward_reference(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """`backward` in plain torch on any device, bit for bit."""
    one = torch.ones_like(gate)
    s = one / (one + exp_reference(-gate))
    return (dy * up) * (s * fma_reference(gate, one - s, one)), dy * silu_reference(gate)

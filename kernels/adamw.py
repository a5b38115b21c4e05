"""AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019), element by element.

Any cut of a tensor gives the same bits.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

import torch
from torch import Tensor

from kernels import device
from kernels.cpu import build
from kernels.elementwise import sqrt_reference


@lru_cache(maxsize=64)
def bias_correction(beta: float, step: int) -> float:
    """1 - beta^step in fp64, by repeated multiplication: `pow` differs between machines."""
    power = 1.0
    for _ in range(step):
        power *= beta
    return 1.0 - power


def scalars(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int) -> list[float]:
    """The eight scalars of an update, computed in fp64; the kernel rounds each once to fp32.

    [1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, sqrt(bias_correction2), eps, lr / bias_correction1]
    """
    return [
        1.0 - lr * weight_decay,
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        math.sqrt(bias_correction(beta2, step)),
        eps,
        lr / bias_correction(beta1, step),
    ]


def step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int
) -> None:
    """One update of p, m, v (fp32, contiguous, same shape as g) in place; `step` counts from 1. Each operation below rounds once:

    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * (g * g)
    p = p * (1 - lr * weight_decay) - (lr / (1 - beta1^step)) * (m / (sqrt(v) / sqrt(1 - beta2^step) + eps))
    """
    if step < 1:
        raise ValueError(f"adamw: step {step} must be at least 1")
    n = p.numel()
    for name, t in (("p", p), ("g", g), ("m", m), ("v", v)):
        if t.dtype is not torch.float32 or not t.is_contiguous() or t.numel() != n:
            raise ValueError(f"adamw: {name} must be contiguous fp32 with {n} elements, got {t.dtype} {tuple(t.shape)}")
    if device.on_gpu(p, g, m, v):
        from kernels.gpu import adamw as gpu

        gpu.step(p, g, m, v, lr, beta1, beta2, eps, weight_decay, step)
        return
    values = _scalars_in_memory(lr, beta1, beta2, eps, weight_decay, step)
    build.library().adamw_step(p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), n, values)


@lru_cache(maxsize=64)
def _scalars_in_memory(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int) -> ctypes.Array:
    """For the many tensors that share a step; the kernel only reads them."""
    return (ctypes.c_float * 8)(*scalars(lr, beta1, beta2, eps, weight_decay, step))


def step_reference(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int
) -> None:
    """`step` in plain torch on any device, bit for bit."""
    values = torch.tensor(scalars(lr, beta1, beta2, eps, weight_decay, step), dtype=torch.float32, device=p.device)
    decay, b1, c1, b2, c2, root, epsilon, rate = values
    m.copy_(b1 * m + c1 * g)
    v.copy_(b2 * v + c2 * (g * g))
    p.copy_(p * decay - rate * (m / (sqrt_reference(v) / root + epsilon)))

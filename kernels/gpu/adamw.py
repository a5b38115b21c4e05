"""The optimizer step, element by element; see `kernels.adamw`."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adamw import scalars
from kernels.gpu import math

_BLOCK = 1024


@triton.jit
def step_kernel(p_ptr, g_ptr, m_ptr, v_ptr, scalars_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    decay, b1, c1, b2 = tl.load(scalars_ptr), tl.load(scalars_ptr + 1), tl.load(scalars_ptr + 2), tl.load(scalars_ptr + 3)
    c2, root, eps, rate = tl.load(scalars_ptr + 4), tl.load(scalars_ptr + 5), tl.load(scalars_ptr + 6), tl.load(scalars_ptr + 7)
    g = tl.load(g_ptr + i, mask=mask, other=0.0)
    m = b1 * tl.load(m_ptr + i, mask=mask, other=0.0) + c1 * g
    v = b2 * tl.load(v_ptr + i, mask=mask, other=0.0) + c2 * (g * g)
    tl.store(m_ptr + i, m, mask=mask)
    tl.store(v_ptr + i, v, mask=mask)
    p = tl.load(p_ptr + i, mask=mask, other=0.0)
    tl.store(p_ptr + i, p * decay - rate * math.div(m, math.div(math.sqrt(v), root) + eps), mask=mask)


@functools.lru_cache(maxsize=64)
def _on_device(device: torch.device, *args: float) -> Tensor:
    """The scalars, each rounded once to fp32; the many tensors of a step share them."""
    return torch.tensor(scalars(*args), dtype=torch.float32).to(device)


def step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int
) -> None:
    """One update of p, m, v in place."""
    if p.numel():
        values = _on_device(p.device, lr, beta1, beta2, eps, weight_decay, step)
        step_kernel[(triton.cdiv(p.numel(), _BLOCK),)](p, g, m, v, values, p.numel(), BLOCK=_BLOCK, **math.LAUNCH)


def compile_cases() -> list:
    from kernels.gpu.ahead_of_time import Case

    signature = dict.fromkeys(("p_ptr", "g_ptr", "m_ptr", "v_ptr", "scalars_ptr"), "*fp32") | {"count": "i32"}
    return [Case(step_kernel, "flat", signature, {"BLOCK": _BLOCK}, tuple(signature))]

"""AdamW on our kernel, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import adamw

if TYPE_CHECKING:
    from pipeline.config import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay (Loshchilov & Hutter 2019), elementwise in single IEEE operations.

    An element's update depends on nothing but that element, so any cut of the parameters over ranks gives the same bits; torch's and
    DeepSpeed's fused versions differ between vector body and tail. State per tensor: step (int), exp_avg and exp_avg_sq (fp32).
    """

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def init_state(self, tensor: Tensor, step: int = 0) -> dict:
        """State of a tensor, made of zeros where there is none."""
        state = self.state[tensor]
        if not state:
            state.update(step=step, **{key: torch.zeros_like(tensor, dtype=torch.float32) for key in MOMENTS})
        return state

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.init_state(p)
                state["step"] += 1
                m, v = (state[key] for key in MOMENTS)
                adamw.step(p.data, p.grad, m, v, group["lr"], beta1, beta2, group["eps"], group["weight_decay"], state["step"])


def parameter_groups(named_parameters: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict]:
    """pg_0: matrices, with weight decay; pg_1: norm weights, without."""
    named = list(named_parameters)
    norms = [p for name, p in named if is_norm(name)]
    groups = [
        {"params": [p for name, p in named if not is_norm(name)], "weight_decay": weight_decay, "name": "pg_0"},
        {"params": norms, "weight_decay": 0.0, "name": "pg_1"},
    ]
    return [g for g in groups if g["params"]]


def is_norm(name: str) -> bool:
    """By Hugging Face name: input_layernorm, post_attention_layernorm, norm, q_norm, k_norm."""
    return name.split(".")[-2].endswith("norm")


def learning_rate(cfg: Optimizer, step: int, total_steps: int) -> float:
    """Rate of optimizer step `step` (from 0) out of `total_steps`: linear warm-up, then constant, linear or cosine to zero.

    fp64 additions, multiplications and divisions only: a library's cos may round differently on another machine.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * ((step + 1) / cfg.warmup_steps)
    done = (step - cfg.warmup_steps) / max(1, total_steps - cfg.warmup_steps)
    match cfg.schedule:
        case "constant":
            return cfg.lr
        case "linear":
            return cfg.lr * max(0.0, 1.0 - done)
        case "cosine":
            return cfg.lr * 0.5 * (1.0 + _cos_pi(min(1.0, done)))
        case _:
            raise ValueError(f"optimizer.schedule={cfg.schedule!r}: choose constant, linear or cosine")


def _cos_pi(x: float) -> float:
    """cos(pi x) for x in [0, 1], by the Taylor series of -sin(pi (x - 1/2)); error below 1e-15."""
    y = math.pi * (0.5 - x)
    term = total = y
    for k in range(1, 13):
        term = -term * y * y / ((2 * k) * (2 * k + 1))
        total += term
    return total

"""adamw against torch.optim.AdamW, fused."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels import adamw
from kernels.bench.shapes import models, randn
from kernels.bench.timing import Case


def cases(device: str, quick: bool) -> Iterator[Case]:
    for shape in models(device):
        n = shape.hidden * shape.intermediate
        p = torch.nn.Parameter(randn(n, device=device))
        p.grad = randn(n, device=device, seed=1)
        optimizer = torch.optim.AdamW([p], lr=1e-3, fused=True)
        own, m, v = (randn(n, device=device, seed=s) for s in (2, 3, 4))
        v.abs_()
        yield _case(shape.name, own, p.grad, m, v, optimizer)


def _case(name: str, p, g, m, v, optimizer: torch.optim.Optimizer) -> Case:
    return Case(
        "adamw", name, f"{p.numel()} elements", lambda: adamw.step(p, g, m, v, 1e-3, 0.9, 0.999, 1e-8, 0.01, 3), optimizer.step, 1.0,
        bytes=7.0 * p.nbytes,
    )  # fmt: skip

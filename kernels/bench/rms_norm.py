"""rms_norm against F.rms_norm and its backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kernels import rms_norm
from kernels.bench.shapes import dtypes, models, randn
from kernels.bench.timing import Case


def cases(device: str, quick: bool) -> Iterator[Case]:
    dtype = dtypes(device)[0]
    for shape in models(device):
        for m in (1, 512) if quick else (1, 16, 512):
            d = shape.hidden
            x, w = randn(m, d, device=device, dtype=dtype).requires_grad_(), randn(d, device=device, dtype=dtype, seed=1).requires_grad_()
            dy, tiles = randn(m, d, device=device, dtype=dtype, seed=2), torch.tensor([*range(0, m, shape.token_leaf), m])
            acc = torch.zeros(d, dtype=torch.int64, device=device)
            out, (_, rstd) = F.rms_norm(x, (d,), w, 1e-6), rms_norm.forward(x.detach(), w.detach(), 1e-6)
            yield _forward(shape.name, x.detach(), w.detach())
            yield _backward(shape.name, x, w, dy, rstd, out, acc, tiles)


def _forward(name: str, x, w) -> Case:
    return Case(
        "rms_norm forward", name, f"M={len(x)}", lambda: rms_norm.forward(x, w, 1e-6), lambda: F.rms_norm(x, w.shape, w, 1e-6), 1.0,
        bytes=2.0 * x.nbytes,
    )  # fmt: skip


def _backward(name: str, x, w, dy, rstd, out, acc, tiles) -> Case:
    plain, weight = x.detach(), w.detach()
    return Case(
        "rms_norm backward", name, f"M={len(x)}", lambda: rms_norm.backward(dy, plain, weight, rstd, acc, tiles, 20),
        lambda: torch.autograd.grad(out, (x, w), dy, retain_graph=True), 1.0, bytes=3.0 * x.nbytes,
    )  # fmt: skip

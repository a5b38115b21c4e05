"""linear: forward, dX and exact dW against F.linear and torch.mm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from kernels import linear
from kernels.bench.shapes import Shape, dtypes, models, randn
from kernels.bench.timing import Case

ROWS = (1, 4, 16, 64, 512)
GRADIENT_ROWS = (16, 64, 512)
MEAN_TARGET = {"linear forward": 1.15}  # geometric mean over the cases of an op


def cases(device: str, quick: bool) -> Iterator[Case]:
    for shape in models(device):
        for dtype in dtypes(device):
            names = ["q_proj", "down_proj"] if quick else list(shape.linears)
            for name in names:
                yield from _of_weight(shape, name, *shape.linears[name], device, dtype, quick)
        if not quick:
            yield from _head(shape, device)


def _of_weight(shape: Shape, name: str, n: int, k: int, device: str, dtype: torch.dtype, quick: bool) -> Iterator[Case]:
    w = randn(n, k, device=device, dtype=dtype, seed=1) * k**-0.5
    kind, size = ("" if device == "cpu" else f" {str(dtype)[6:]}"), w.element_size()
    rows = ((1, 16, 512) if quick else ROWS) if device == "cpu" else (1, 16, 256, 4096)
    for m in rows:
        x, dy = randn(m, k, device=device, dtype=dtype), randn(m, n, device=device, dtype=dtype, seed=2)
        work: dict[str, Any] = {"flops": 2.0 * m * n * k, "bytes": float(size * (n * k + m * n + m * k)), "dtype": dtype}
        detail = f"{name} M={m}{kind}"
        target = 1.5 if device == "cpu" else 1 / 0.9 if m <= 16 else 1 / 0.8
        yield Case("linear forward", shape.name, detail, _call(linear.forward, x, w, shape.k_leaf), _call(F.linear, x, w), target, **work)
        if m not in GRADIENT_ROWS and device == "cpu" or m < 16:
            continue
        yield Case("linear dX", shape.name, detail, _call(linear.input_grad, dy, w, shape.k_leaf), _call(torch.mm, dy, w), target, **work)
        acc = torch.zeros(n, k, dtype=torch.int64, device=device)
        tiles = torch.tensor([*range(0, m, shape.token_leaf), m])
        gradient = _call(linear.accumulate_weight_grad, acc, dy, x, tiles, 20)
        wide: dict[str, Any] = {"flops": work["flops"], "bytes": 16.0 * n * k + size * (m * n + m * k), "dtype": dtype}
        yield Case("linear dW", shape.name, detail, gradient, _call(torch.mm, dy.t(), x), 1.5 if device == "cpu" else 1 / 0.6, **wide)


def _head(shape: Shape, device: str) -> Iterator[Case]:
    """The LM head as the decode step has it."""
    n, k, dtype = shape.vocab, shape.hidden, dtypes(device)[0]
    w = randn(n, k, device=device, dtype=dtype, seed=1)
    for m in (1, 8):
        x = randn(m, k, device=device, dtype=dtype)
        size = w.element_size()
        work: dict[str, Any] = {"flops": 2.0 * m * n * k, "bytes": float(size * (n * k + m * k) + 4 * m * n)}
        ours = _call(linear.forward, x, w, shape.k_leaf, torch.float32)
        target = 1.5 if device == "cpu" else 1 / 0.9
        yield Case("linear forward", shape.name, f"lm_head M={m}", ours, _call(F.linear, x, w), target, **work, heavy=n > 100_000)


def _call(function, *args):
    return lambda: function(*args)

"""embedding against F.embedding, and its exact gradient against index_add_ into an existing gradient."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kernels import embedding
from kernels.bench.shapes import dtypes, models, randn
from kernels.bench.timing import Case


def cases(device: str, quick: bool) -> Iterator[Case]:
    for shape in models(device):
        w = randn(shape.vocab, shape.hidden, device=device, dtype=dtypes(device)[0])
        for m in (1, 512) if quick else (1, 16, 512):
            yield from _of_rows(shape.name, m, w)


def _of_rows(name: str, m: int, w: torch.Tensor) -> Iterator[Case]:
    ids = torch.arange(m, device=w.device) * 7 % len(w)
    dx = randn(m, w.shape[1], device=str(w.device), dtype=w.dtype, seed=1)
    acc, grad = torch.zeros(w.shape, dtype=torch.int64, device=w.device), torch.zeros_like(w)
    yield Case(
        "embedding forward", name, f"M={m}", lambda: embedding.forward(ids, w), lambda: F.embedding(ids, w), 1.0, bytes=2.0 * dx.nbytes
    )
    yield Case(
        "embedding backward", name, f"M={m}", lambda: embedding.accumulate_grad(acc, ids, dx, 0, 20), lambda: grad.index_add_(0, ids, dx),
        1.0, bytes=3.0 * dx.nbytes,
    )  # fmt: skip

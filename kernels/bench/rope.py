"""rope against the usual torch expression."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels import rope
from kernels.bench.shapes import dtypes, models, randn
from kernels.bench.timing import Case


def cases(device: str, quick: bool) -> Iterator[Case]:
    for shape in models(device):
        tables = [t.to(device) for t in rope.tables(shape.head_dim, 1024, 1e6)]
        for m in (1, 512) if quick else (1, 16, 512):
            x, positions = randn(m, shape.heads, shape.head_dim, device=device, dtype=dtypes(device)[0]), torch.arange(m, device=device)
            yield _case(shape.name, x, positions, *tables)


def _case(name: str, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Case:
    def theirs() -> Tensor:
        c, s = (torch.cat((t, t), 1)[positions][:, None].to(x.dtype) for t in (cos[: len(x)], sin[: len(x)]))
        first, second = x.chunk(2, 2)
        return x * c + torch.cat((-second, first), 2) * s

    return Case("rope", name, f"M={len(x)}", lambda: rope.apply(x, positions, cos, sin), theirs, 1.0, bytes=2.0 * x.nbytes)

"""swiglu against F.silu(gate) * up and its backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kernels import swiglu
from kernels.bench.shapes import dtypes, models, randn
from kernels.bench.timing import Case


def cases(device: str, quick: bool) -> Iterator[Case]:
    for shape in models(device):
        for m in (1, 512) if quick else (1, 16, 512):
            yield from _of_rows(shape.name, m, shape.intermediate, device, dtypes(device)[0])


def _of_rows(name: str, m: int, width: int, device: str, dtype: torch.dtype) -> Iterator[Case]:
    gate, up, dy = (randn(m, width, device=device, dtype=dtype, seed=s) for s in range(3))
    leaves = gate.clone().requires_grad_(), up.clone().requires_grad_()
    out = F.silu(leaves[0]) * leaves[1]
    yield Case(
        "swiglu forward", name, f"M={m}", lambda: swiglu.forward(gate, up), lambda: F.silu(gate) * up, 1.0, bytes=3.0 * gate.nbytes
    )  # fmt: skip
    yield Case(
        "swiglu backward", name, f"M={m}", lambda: swiglu.backward(dy, gate, up),
        lambda: torch.autograd.grad(out, leaves, dy, retain_graph=True), 1.0, bytes=5.0 * gate.nbytes,
    )  # fmt: skip

"""logprob: the fused head with logprob and entropy, against F.linear, log_softmax and gather (which report no entropy)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import logprob
from kernels.bench.shapes import Shape, dtypes, models, randn
from kernels.bench.timing import Case


def cases(device: str, quick: bool) -> Iterator[Case]:
    for shape in models(device):
        large = shape.vocab > 100_000 and device == "cpu"
        rows = (1, 64) if quick or large else (1, 8, 64, 512)
        if quick and large:
            continue
        for m in rows:
            yield from _of_rows(shape, m, device, dtypes(device)[0])


def _of_rows(shape: Shape, m: int, device: str, dtype: torch.dtype) -> Iterator[Case]:
    v, k = shape.vocab, shape.hidden
    h = randn(m, k, device=device, dtype=dtype).requires_grad_()
    w = (randn(v, k, device=device, dtype=dtype, seed=1) * k**-0.5).requires_grad_()
    targets, g = torch.arange(m, device=device) * 7 % v, randn(m, device=device, seed=2)
    leaves = -(-v // shape.vocab_leaf)
    sizes = (shape.k_leaf, shape.vocab_leaf, 0, [(0, leaves)])
    tiles = torch.tensor([*range(0, m, shape.token_leaf), m])

    def ours() -> tuple[Tensor, Tensor, Tensor]:
        stats, target = logprob.partials(h.detach(), w.detach(), targets, 1.0, *sizes)
        return logprob.finish(stats[0], target)

    def theirs() -> Tensor:
        return torch.log_softmax(F.linear(h, w).float(), -1).gather(1, targets[:, None])

    def theirs_forward() -> None:
        with torch.no_grad():
            theirs()

    _, entropy, lse = ours()
    acc, none = torch.zeros(v, k, dtype=torch.int64, device=device), torch.zeros(m, device=device)
    saved: list[Tensor] = []

    def theirs_backward() -> None:
        if not saved:
            saved.append(theirs())
        torch.autograd.grad(saved[0], (h, w), g[:, None], retain_graph=True)

    def ours_backward() -> None:
        logprob.backward(h.detach(), w.detach(), targets, lse, entropy, g, none, 1.0, *sizes, acc, tiles, 20)

    flops, heavy = 2.0 * m * v * k, m * v * k > 2e9
    size = w.element_size()
    forward_target, backward_target = (1.0, 1.2) if device == "cpu" else (1.25, 1.67)
    name, detail, once = shape.name, f"V={v} M={m}", float(size * v * k)
    yield Case("logprob forward", name, detail, ours, theirs_forward, forward_target, flops, once, heavy)
    yield Case("logprob backward", name, detail, ours_backward, theirs_backward, backward_target, 2 * flops, once + 16 * v * k, heavy)

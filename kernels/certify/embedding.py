"""What is certified of kernels/embedding.py: the look-up's bytes, and the exact gradient of the table.

rule              equal to the references: repeated ids, -0, subnormal numbers
tensor parallel   the table's rows cut over ranks
data parallel     tokens on any rank in any order: integer sums
rows              M tokens at any offset; padding: dx as a view into NaN
C++, builds and threads, flush to zero: see setting.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels import embedding
from kernels.certify.core import Case
from kernels.certify.setting import Setting, host

DTYPES = (torch.float32, torch.bfloat16)
VOCAB, SCALE = 23, 40


def cases(s: Setting) -> Iterator[Case]:
    for down in (0, -40, -135):
        for m in (1, 30):
            yield Case(
                "rule", f"M={m}, values of 2^{down}", lambda a=(m, 33, down): outputs(s, *a), lambda a=(m, 33, down): references(s, *a)
            )
    m = 20 if s.device == "interpreter" else 260
    ids, w, dx = operands(s, m, 24)
    y = embedding.forward(ids, w)
    for count in (c for c in s.rows if c <= m):
        for a in sorted({0, m - count}):
            yield Case(
                "rows", f"M={count} at {a}", lambda o=slice(a, a + count): embedding.forward(ids[o], w), lambda o=slice(a, a + count): y[o]
            )
    for ranks in s.ranks:
        yield Case(
            "tensor parallel", f"tp={ranks}", lambda n=ranks: tensor_parallel(s, ids, w, dx, n), lambda: [y.float(), gradient(s, ids, dx)]
        )
        yield Case("data parallel", f"dp={ranks}", lambda n=ranks: data_parallel(s, ids, dx, n), lambda: gradient(s, ids, dx))
    yield Case("padding", "dx inside NaN", lambda: gradient(s, ids, s.framed(dx)), lambda: gradient(s, ids, dx))
    yield from s.circumstances("M=200", lambda s: outputs(s, 20 if s.device == "interpreter" else 200, 70, 0))
    yield from s.flush_to_zero("numbers of 2^-135", lambda s: outputs(s, 20, 33, -135))


def operands(s: Setting, m: int, dim: int, scale_log2: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """ids [M], w [V,H], dx [M,H]."""
    w = s.values(VOCAB, dim, seed=1, scale_log2=scale_log2)
    w[0, :2] = -0.0
    return s.on(torch.arange(m) * m % VOCAB), w, s.values(m, dim, seed=2, scale_log2=scale_log2)


def gradient(s: Setting, ids: Tensor, dx: Tensor, first: int = 0, rows: int = VOCAB) -> Tensor:
    acc = s.zeros(rows, dx.shape[1])
    embedding.accumulate_grad(acc, ids, dx, first, SCALE)
    return acc


def outputs(s: Setting, m: int, dim: int, scale_log2: int) -> list[Tensor]:
    ids, w, dx = operands(s, m, dim, scale_log2)
    return [embedding.forward(ids, w), embedding.forward(ids, w[2:9], 2), gradient(s, ids, dx), gradient(s, ids, dx, 2, 7)]


def references(s: Setting, m: int, dim: int, scale_log2: int) -> list[Tensor]:
    ids, w, dx = host(*operands(s, m, dim, scale_log2))
    grads = [torch.zeros(rows, dim, dtype=torch.int64) for rows in (VOCAB, 7)]
    for acc, first in zip(grads, (0, 2)):
        embedding.accumulate_grad_reference(acc, ids, dx, first, SCALE)
    return [s.store(embedding.forward_reference(ids, w)), s.store(embedding.forward_reference(ids, w[2:9], 2)), *grads]


def tensor_parallel(s: Setting, ids: Tensor, w: Tensor, dx: Tensor, tp: int) -> list[Tensor]:
    cuts = [VOCAB * r // tp for r in range(tp + 1)]
    parts = [embedding.forward(ids, w[a:b], a).float() for a, b in zip(cuts, cuts[1:])]
    bits = torch.stack([p.view(torch.int32) for p in parts]).sum(0, dtype=torch.int32)  # as collectives.sum_disjoint adds them
    return [bits.view(torch.float32), torch.cat([gradient(s, ids, dx, a, b - a) for a, b in zip(cuts, cuts[1:])])]


def data_parallel(s: Setting, ids: Tensor, dx: Tensor, dp: int) -> Tensor:
    return torch.stack([gradient(s, ids[r::dp], dx[r::dp]) for r in range(dp)]).sum(0)

"""What is certified of kernels/adamw.py: three steps of p, m and v.

rule              equal to the reference, from subnormal to large gradients
columns           any cut of a tensor over ranks (ZeRO) gives the bits of the whole
padding           between NaN
C++, builds and threads, flush to zero: see setting.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels import adamw
from kernels.certify.core import Case
from kernels.certify.setting import Setting, unflushed

DTYPES = (torch.float32,)
RATES = (1e-2, 0.9, 0.95, 1e-8, 0.1)  # lr, beta1, beta2, eps, weight decay


def cases(s: Setting) -> Iterator[Case]:
    for up in (-140, -70, 0, 20):
        yield Case("rule", f"gradients of 2^{up}", lambda u=up: outputs(s, 301, u), lambda u=up: references(s, 301, u))
    n = 77 if s.small else 10_001
    for ranks in s.ranks:
        yield Case("columns", f"{ranks} ranks", lambda r=ranks: outputs(s, n, 0, r), lambda: outputs(s, n))
    yield Case("padding", "between NaN", lambda: between_nan(s, n), lambda: outputs(s, n))
    yield from s.circumstances("70001 elements", lambda s: outputs(s, 701 if s.device == "interpreter" else 70_001))
    yield from s.flush_to_zero("gradients of 2^-70", lambda s: outputs(s, 301, -70))


@unflushed
def operands(s: Setting, n: int, scale_log2: int) -> list[Tensor]:
    """p, g, m, v [n]."""
    g = s.values(n, seed=2, scale_log2=scale_log2)
    return [s.values(n, seed=1), g, g * 0.25, g.abs() * g.abs()]


def outputs(s: Setting, n: int, scale_log2: int = 0, ranks: int = 1) -> list[Tensor]:
    whole = operands(s, n, scale_log2)
    for r in range(ranks):
        run(adamw.step, *(t[n * r // ranks : n * (r + 1) // ranks] for t in whole))
    return [whole[0], *whole[2:]]


def references(s: Setting, n: int, scale_log2: int) -> list[Tensor]:
    p, g, m, v = (t.cpu() for t in operands(s, n, scale_log2))
    run(adamw.step_reference, p, g, m, v)
    return [p, m, v]


def run(function: Callable[..., None], p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    for step in (1, 2, 1000):
        function(p, g, m, v, *RATES, step)


def between_nan(s: Setting, n: int) -> list[Tensor]:
    """Results, and whether the neighbours are still NaN."""
    frames = [torch.cat([t.new_full((7,), math.nan), t, t.new_full((9,), math.nan)]) for t in operands(s, n, 0)]
    run(adamw.step, *(f[7 : 7 + n] for f in frames))
    if not all(bool(f[:7].isnan().all()) and bool(f[7 + n :].isnan().all()) for f in frames):
        raise AssertionError("adamw wrote outside its tensors")
    return [frames[i][7 : 7 + n] for i in (0, 2, 3)]

"""What is certified of kernels/elementwise.py: exp, log, sqrt, rsqrt, silu.

rule              equal to the references: random bit patterns (subnormal numbers, infinities, NaN), and the ranges where exp and log bend
rows              any cut gives the bits of the whole
C++, builds and threads, flush to zero: see setting.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels import elementwise
from kernels.certify.core import Case
from kernels.certify.setting import Setting

DTYPES = (torch.float32,)
FUNCTIONS = ("exp", "log", "sqrt", "rsqrt", "silu")


def cases(s: Setting) -> Iterator[Case]:
    size = 1 << (10 if s.device == "interpreter" else 15 if s.quick else 19)
    for name in FUNCTIONS:
        yield Case("rule", name, lambda f=name: apply(f, numbers(s, size)), lambda f=name: apply(f + "_reference", numbers(s, size).cpu()))
        x = numbers(s, 300)
        whole = apply(name, x)
        for count in s.rows:
            own = slice(300 - count, 300)
            yield Case("rows", f"{name}, {count} elements", lambda f=name, x=x, o=own: apply(f, x[o]), lambda w=whole, o=own: w[o])
    yield from s.circumstances("all", lambda s: [apply(f, numbers(s, 1 << (9 if s.device == "interpreter" else 16))) for f in FUNCTIONS])
    yield from s.flush_to_zero("all", lambda s: [apply(f, numbers(s, 4096)) for f in FUNCTIONS])


def numbers(s: Setting, n: int) -> Tensor:
    patterns = torch.randint(-(1 << 31), 1 << 31, (n // 2,), generator=torch.Generator().manual_seed(n)).to(torch.int32).view(torch.float32)
    return torch.cat([s.on(patterns), s.values(n // 4, seed=1, scale_log2=6), s.values(n - n // 2 - n // 4, seed=2)])


def apply(function: str, x: Tensor) -> Tensor:
    return getattr(elementwise, function)(x)

"""What is certified of kernels/swiglu.py, forward and backward.

rule              equal to the references, over numbers from subnormal to where exp overflows
rows, columns     rows at any offset; columns of a wider tensor (a tensor-parallel rank's features)
padding           operands as views into NaN
C++, builds and threads, flush to zero: see setting.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels import swiglu
from kernels.certify.core import Case
from kernels.certify.setting import Setting, host

DTYPES = (torch.float32, torch.bfloat16)


def cases(s: Setting) -> Iterator[Case]:
    for up in (-135, -66, 0, 3, 7):
        yield Case("rule", f"values of 2^{up}", lambda u=up: outputs(s, 5, 77, u), lambda u=up: references(s, 5, 77, u))
    m, f = (20, 40) if s.device == "interpreter" else (260, 150)
    dy, gate, up = operands(s, m, f)
    y, grads = swiglu.forward(gate, up), swiglu.backward(dy, gate, up)
    for count in (c for c in s.rows if c <= m):
        for a in sorted({0, m - count}):
            own, name = slice(a, a + count), f"M={count} at {a}"
            yield Case("rows", f"forward, {name}", lambda o=own: swiglu.forward(gate[o], up[o]), lambda o=own: y[o])
            yield Case(
                "rows", f"backward, {name}", lambda o=own: swiglu.backward(dy[o], gate[o], up[o]), lambda o=own: [t[o] for t in grads]
            )
    for tp in s.ranks:
        for r in range(tp):
            own, name = slice(f * r // tp, f * (r + 1) // tp), f"rank {r} of {tp}"
            yield Case("columns", name, lambda o=own: swiglu.forward(gate[:, o], up[:, o]), lambda o=own: y[:, o])
    yield Case("padding", "operands inside NaN", lambda: outputs(s, 9, 40, framed=True), lambda: outputs(s, 9, 40))
    for shape in ((1, 70), (9, 40)) if s.small else ((1, 3072), (200, 777)):
        yield from s.circumstances(f"{shape}", lambda s, a=shape: outputs(s, *a))
    yield from s.flush_to_zero("numbers of 2^-66", lambda s: outputs(s, 9, 40, -66))


def operands(s: Setting, m: int, f: int, scale_log2: int = 2) -> list[Tensor]:
    """dy, gate, up [M,F]."""
    return [s.values(m, f, seed=i, scale_log2=scale_log2) for i in range(3)]


def outputs(s: Setting, m: int, f: int, scale_log2: int = 2, framed: bool = False) -> list[Tensor]:
    dy, gate, up = (s.framed(t) if framed else t for t in operands(s, m, f, scale_log2))
    return [swiglu.forward(gate, up), *swiglu.backward(dy, gate, up)]


def references(s: Setting, m: int, f: int, scale_log2: int) -> list[Tensor]:
    dy, gate, up = host(*operands(s, m, f, scale_log2))
    return [s.store(t) for t in (swiglu.forward_reference(gate, up), *swiglu.backward_reference(dy, gate, up))]

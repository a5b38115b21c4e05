"""What is certified of kernels/rng.py: the generator, its streams, the keys of samples, and sampling.

rule              Philox against plain Python, sampling against the reference
offsets           any part of a stream is a part of the whole
rows              a row's token depends on nothing but its logits and key: M rows at any offset, strided logits inside NaN
C++, builds and threads, flush to zero: see setting.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels import rng
from kernels.certify.core import Case
from kernels.certify.setting import Setting

DTYPES = (torch.float32,)
FILTERS = ((0, 1.0), (30, 1.0), (0, 0.9), (12, 0.8))  # top_k, top_p


def cases(s: Setting) -> Iterator[Case]:
    if s.device == "cpu":  # streams and keys are made in main memory
        for i in range(20):
            words = [int(v) for v in torch.randint(0, 1 << 32, (6,), generator=torch.Generator().manual_seed(i))]
            yield Case(
                "rule",
                f"philox {i}",
                lambda w=words: list(rng.philox(w[:4], w[4:])),
                lambda w=words: list(rng.philox_reference(w[:4], w[4:])),
            )
        for name, stream in (("uniform", rng.uniform), ("normal", lambda key, n, o=0: rng.normal(key, (n,), o))):
            for a, b in ((0, 1), (1, 8), (17, 300), (299, 300)):
                yield Case(
                    "offsets",
                    f"{name} {a}:{b}",
                    lambda f=stream, a=a, b=b: f((3, 4), b - a, a),
                    lambda f=stream, a=a, b=b: f((3, 4), 300)[a:b],
                )
        for a, b in ((0, 1), (1, 8), (17, 300)):
            yield Case("offsets", f"gumbel {a}:{b}", lambda a=a, b=b: rng.gumbel(9, b - a, a), lambda a=a, b=b: rng.gumbel(9, 300)[a:b])
        yield from s.circumstances(
            "streams", lambda s: [rng.normal((5,), (7_001,)), rng.uniform((7,), 30_000), rng.gumbel(8, 30_000), keys(s, 40)]
        )
    m, vocab = (6, 70) if s.device == "interpreter" else (40, 777)
    for top_k, top_p in FILTERS:
        rest, name = (top_k, top_p), f"top_k {top_k}, top_p {top_p}"
        yield Case(
            "rule",
            name,
            lambda r=rest: draw(s, m, vocab, *r),
            lambda r=rest: rng.sample_reference(logits(s, m, vocab).cpu(), 1.3, keys(s, m).cpu(), *r),
        )
        for count in (c for c in s.rows if c <= m):
            own = slice(m - count, m)
            yield Case(
                "rows",
                f"M={count}, {name}",
                lambda o=own, r=rest: draw(s, m, vocab, *r, own=o),
                lambda o=own, r=rest: draw(s, m, vocab, *r)[o],
            )
        yield Case("padding", name, lambda r=rest: draw(s, m, vocab, *r, framed=True), lambda r=rest: draw(s, m, vocab, *r))
    yield from s.circumstances("sample", lambda s: [draw(s, m, vocab, *rest) for rest in FILTERS])
    yield from s.flush_to_zero("sample", lambda s: [draw(s, m, vocab, *rest) for rest in FILTERS])


def keys(s: Setting, m: int) -> Tensor:
    return s.on(torch.tensor([rng.derive((1, i)) >> 1 for i in range(m)], dtype=torch.int64))


def logits(s: Setting, m: int, vocab: int) -> Tensor:
    return s.values(m, vocab, seed=6, scale_log2=3)


def draw(s: Setting, m: int, vocab: int, top_k: int, top_p: float, own: slice | None = None, framed: bool = False) -> Tensor:
    own = own or slice(0, m)
    rows = logits(s, m, vocab)
    return rng.sample((s.framed(rows) if framed else rows)[own], 1.3, keys(s, m)[own], top_k, top_p)

"""What is certified of kernels/attention.py: forward, dq, dk and dv of causal attention over packed sequences and caches.

rule              equal to the references at tiny shapes, several groupings of heads, a leaf that is not full
decode            rows one by one against a cache = prefill of the whole = prefill in chunks; stale cache rows are NaN
pages             keys and values in shuffled pages of any size = contiguous ones; pages that belong to nobody are NaN
schedules         (Triton) a program per leaf and one for all leaves
rows              M query rows at any offset, columns of the packed batch (heads) at a stride
packing           a sequence alone = the same among others
context parallel  query tiles and key ranges scattered over ranks
padding           rows and heads as views into NaN
C++, builds and threads, flush to zero: see setting.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import attention, device
from kernels.certify.core import Case
from kernels.certify.setting import Setting, host

TENSOR_CORES = True
NARROWS = True
DTYPES = (torch.float32, torch.bfloat16)
SMALL: tuple[tuple, ...] = (((19, 2),), ((9,), 3, 1, 10))
LARGE: tuple[tuple, ...] = (((150, 33), 6, 2, 24, 64, 64), ((9,), 3, 1, 10), ((1,), 4, 2, 64))
TINY: tuple[tuple, ...] = (((7,), 2, 1, 8, 4, 4), ((13, 1, 6), 4, 2, 8, 4, 4), ((11,), 6, 1, 20, 8, 4), ((5, 5), 1, 1, 3, 2, 2))


@dataclass
class Batch:
    """Sequences of the given lengths, packed: q, do [M,Hq,D], k, v [M,Hkv,D]."""

    s: Setting
    lengths: tuple[int, ...]
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    kv_leaf: int = 8
    token_leaf: int = 16
    scale_log2: int = 0

    def __post_init__(self):
        rows, s = sum(self.lengths), self.s
        heads = (self.q_heads, self.kv_heads, self.kv_heads, self.q_heads)
        self.q, self.k, self.v, self.do = (
            s.values(rows, h, self.head_dim, seed=i, scale_log2=self.scale_log2 if i > 1 else 1) for i, h in enumerate(heads)
        )
        self.starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        self.seqs = s.on(torch.tensor([(a, a + n, a, n) for a, n in zip(self.starts, self.lengths)]))
        self.positions = s.on(torch.cat([torch.arange(n) for n in self.lengths]))
        self.ranges = s.on(torch.tensor([(i, 0, n) for i, n in enumerate(self.lengths)]))
        self.scale = self.head_dim**-0.5

    def forward(self) -> tuple[Tensor, ...]:
        return attention.forward(self.q, self.k, self.v, self.seqs, self.positions, self.scale, self.kv_leaf)

    def all(self) -> list[Tensor]:
        """o, m, norm, dq, delta, dk, dv."""
        o, m, norm = self.forward()
        rest = self.seqs, self.positions
        dq, delta = attention.backward_q(self.do, self.q, self.k, self.v, o, m, norm, *rest, self.scale, self.kv_leaf)
        keys = attention.backward_kv(self.do, self.q, self.k, self.v, m, norm, delta, *rest, self.ranges, self.scale, self.token_leaf)
        return [o, m, norm, dq, delta, *keys]

    def references(self) -> list[Tensor]:
        """The same by the rule: fp32 throughout, results rounded when they are stored."""
        do, q, k, v, seqs, positions, ranges = host(self.do, self.q, self.k, self.v, self.seqs, self.positions, self.ranges)
        o, m, norm = attention.forward_reference(q, k, v, seqs, positions, self.scale, self.kv_leaf)
        stored = self.s.store(o)
        back = do, q, k, v, stored.float(), m, norm, seqs, positions, self.scale, self.kv_leaf
        dq, delta = attention.backward_q_reference(*back)
        dk, dv = attention.backward_kv_reference(do, q, k, v, m, norm, delta, seqs, positions, ranges, self.scale, self.token_leaf)
        return [stored, m, norm, self.s.store(dq), delta, self.s.store(dk), self.s.store(dv)]


def cases(s: Setting) -> Iterator[Case]:
    for shape in TINY[: 2 if s.quick else None]:
        if s.has_rule:
            yield Case("rule", f"{shape}", lambda a=shape: Batch(s, *a).all(), lambda a=shape: Batch(s, *a).references())
    if s.has_rule:
        yield Case(
            "rule", "values of 2^-130", lambda: Batch(s, (9,), scale_log2=-130).all(), lambda: Batch(s, (9,), scale_log2=-130).references()
        )
    yield from decode(s)
    yield from pages(s)
    yield from schedules(s)
    yield from rows(s)
    yield from packing(s)
    yield from context_parallel(s)
    yield Case("padding", "q, k, v, do inside NaN", lambda: framed(Batch(s, (20, 13))).all(), lambda: Batch(s, (20, 13)).all())
    for shape in SMALL if s.small else LARGE:
        yield from s.circumstances(f"{shape}", lambda s, a=shape: Batch(s, *a).all())
    yield from s.flush_to_zero("values of 2^-130", lambda s: Batch(s, (30, 7), scale_log2=-130).all())


def decode(s: Setting) -> Iterator[Case]:
    n = 12 if s.device == "interpreter" else 70
    for heads in ((4, 2, 16),) if s.small else ((4, 2, 16), (3, 1, 64), (5, 5, 8), (16, 2, 128)):
        batch = Batch(s, (n,), *heads)
        for chunks in ([1] * n, [n // 2 - 1, 1, 1, n - n // 2 - 1], [n - 1, 1], [2, n - 2]):
            name = f"{heads}, chunks {chunks if len(chunks) < 9 else 'of 1'}"
            yield Case("decode", name, lambda b=batch, c=chunks: in_chunks(b, c), lambda b=batch: b.forward())


def in_chunks(batch: Batch, chunks: list[int]) -> list[Tensor]:
    """The forward pass of one sequence whose rows come in chunks, against a cache with NaN where nothing was written yet."""
    s, capacity, start, parts = batch.s, sum(chunks) + 5, 0, []
    cache = batch.k.new_full((2, batch.kv_heads, capacity, batch.head_dim), math.nan).transpose(1, 2)  # head stride > row stride
    for size in chunks:
        own = slice(start, start + size)
        cache[0, own], cache[1, own] = batch.k[own], batch.v[own]
        seqs, positions = s.on(torch.tensor([(0, size, 0, own.stop)])), s.on(torch.arange(start, own.stop, dtype=torch.int32))
        parts.append(attention.forward(batch.q[own], cache[0], cache[1], seqs, positions, batch.scale, batch.kv_leaf))
        start = own.stop
    return [torch.cat(outputs) for outputs in zip(*parts)]


def pages(s: Setting) -> Iterator[Case]:
    batch = Batch(s, (11, 6) if s.small else (70, 33, 16))
    for size in (4, 7) if s.small else (1, 7, 16, 64):
        yield Case("pages", f"of {size} rows", lambda n=size: paged(batch, n), lambda: batch.forward())


def paged(batch: Batch, size: int) -> tuple[Tensor, ...]:
    """The forward pass over the same keys and values, in pages that lie backwards, each beside one of NaN."""
    counts = [-(-n // size) for n in batch.lengths]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    cache = batch.k.new_full((2, 2 * sum(counts) * size, batch.kv_heads, batch.head_dim), math.nan)
    page = 2 * sum(counts)
    for i, (start, n) in enumerate(zip(batch.starts, batch.lengths)):
        for j in range(counts[i]):
            page -= 2
            table[i, j] = page
            own = slice(start + j * size, start + min((j + 1) * size, n))
            at = slice(page * size, page * size + own.stop - own.start)
            cache[0, at], cache[1, at] = batch.k[own], batch.v[own]
    seqs = batch.seqs.clone()
    seqs[:, 2] = 0
    rest = batch.scale, batch.kv_leaf, batch.s.on(table), size
    return attention.forward(batch.q, cache[0], cache[1], seqs, batch.positions, *rest)


def schedules(s: Setting) -> Iterator[Case]:
    if s.device == "cpu":
        return
    from kernels.gpu import attention_forward

    batch = Batch(s, (13, 6)) if s.small else Batch(s, (300, 33), 16, 8, 128, 64)

    def forward(split: bool) -> tuple[Tensor, ...]:
        device.on_gpu(batch.q)
        arguments = batch.q, batch.k, batch.v, batch.seqs, batch.positions, batch.scale, batch.kv_leaf
        return attention_forward.forward(*arguments, split=split)

    yield Case("schedules", "a program per leaf", lambda: forward(True), lambda: forward(False))


def rows(s: Setting) -> Iterator[Case]:
    n = 20 if s.device == "interpreter" else 64 if s.quick else 300
    batch = Batch(s, (n,), 4, 2, 16, 64 if n > 64 else 8)
    saved = batch.forward()
    for count in (c for c in s.rows if c <= n):
        for a in sorted({0, n // 3, n - count} & set(range(n - count + 1))):
            own = slice(a, a + count)
            yield Case("rows", f"M={count} at {a}", lambda o=own: some_rows(batch, o), lambda o=own: [t[o] for t in saved])


def some_rows(batch: Batch, own: slice) -> tuple[Tensor, ...]:
    seqs = batch.s.on(torch.tensor([(0, own.stop - own.start, 0, len(batch.k))]))
    return attention.forward(batch.q[own], batch.k, batch.v, seqs, batch.positions[own], batch.scale, batch.kv_leaf)


def packing(s: Setting) -> Iterator[Case]:
    batch = Batch(s, (6, 1, 11) if s.device == "interpreter" else (30, 1, 55, 16))
    results = batch.all()
    for a, n in zip(batch.starts, batch.lengths):
        alone = Batch(s, (n,))
        alone.q, alone.k, alone.v, alone.do = (t[a : a + n] for t in (batch.q, batch.k, batch.v, batch.do))
        yield Case("packing", f"sequence of {n}", lambda b=alone: b.all(), lambda a=a, n=n: [t[a : a + n] for t in results])


def context_parallel(s: Setting) -> Iterator[Case]:
    """Rank r owns every cp-th token tile of each sequence: the rows of dq, and the keys of dk and dv from gathered rows."""
    batch = Batch(s, (20, 9) if s.device == "interpreter" else (90, 41), token_leaf=4 if s.device == "interpreter" else 16)
    o, m, norm, dq, delta, dk, dv = batch.all()
    for cp in s.ranks:
        for rank in range(cp):
            table, ranges, mine = [], [], []
            for i, (start, n) in enumerate(zip(batch.starts, batch.lengths)):
                tiles = [(a, min(a + batch.token_leaf, n)) for a in range(0, n, batch.token_leaf)][rank::cp]
                table.append((len(mine), len(mine) + sum(b - a for a, b in tiles), start, n))
                mine += [start + p for a, b in tiles for p in range(a, b)]
                ranges += [(i, a, b) for a, b in tiles]
            if mine:
                args = batch, s.counts(*mine), s.on(torch.tensor(table)), s.on(torch.tensor(ranges)), m, norm, delta
                expected = [t[s.counts(*mine)] for t in (o, m, norm, dq, delta, dk, dv)]
                yield Case("context parallel", f"rank {rank} of {cp}", lambda a=args: one_rank(*a), lambda e=expected: e)


def one_rank(batch: Batch, mine: Tensor, table: Tensor, ranges: Tensor, m: Tensor, norm: Tensor, delta: Tensor) -> list[Tensor]:
    q, do, positions = batch.q[mine], batch.do[mine], batch.positions[mine]
    own = attention.forward(q, batch.k, batch.v, table, positions, batch.scale, batch.kv_leaf)
    back = attention.backward_q(do, q, batch.k, batch.v, *own, table, positions, batch.scale, batch.kv_leaf)
    gathered = batch.do, batch.q, batch.k, batch.v, m, norm, delta, batch.seqs, batch.positions
    return [*own, *back, *attention.backward_kv(*gathered, ranges, batch.scale, batch.token_leaf)]


def framed(batch: Batch) -> Batch:
    batch.q, batch.k, batch.v, batch.do = (batch.s.framed(t) for t in (batch.q, batch.k, batch.v, batch.do))
    return batch

"""Attention: decoding = prefill = chunked prefill; rows and keys split over ranks; exact references; builds; errors against fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import attention
from kernels.cpu import build

KV_LEAF, TOKEN_LEAF = 8, 16


@dataclass
class Packed:
    """Sequences of the given lengths, packed: q, do [M,Hq,D], k, v [M,Hkv,D]."""

    lengths: tuple[int, ...]
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    kv_leaf: int = KV_LEAF
    token_leaf: int = TOKEN_LEAF

    def __post_init__(self):
        generator, rows = torch.Generator().manual_seed(sum(self.lengths)), sum(self.lengths)
        shapes = [(rows, heads, self.head_dim) for heads in (self.q_heads, self.kv_heads, self.kv_heads, self.q_heads)]
        self.q, self.k, self.v, self.do = (torch.randn(shape, generator=generator) for shape in shapes)
        self.starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        self.seqs = torch.tensor([(a, a + n, a, n) for a, n in zip(self.starts, self.lengths)])
        self.positions = torch.cat([torch.arange(n) for n in self.lengths])
        self.ranges = torch.tensor([(i, 0, n) for i, n in enumerate(self.lengths)])
        self.scale = self.head_dim**-0.5

    def forward(self, function=attention.forward) -> tuple[Tensor, ...]:
        return function(self.q, self.k, self.v, self.seqs, self.positions, self.scale, self.kv_leaf)

    def backward(self, saved, q_function=attention.backward_q, kv_function=attention.backward_kv) -> tuple[Tensor, ...]:
        o, m, norm = saved
        dq, delta = q_function(self.do, self.q, self.k, self.v, o, m, norm, self.seqs, self.positions, self.scale, self.kv_leaf)
        args = (m, norm, delta, self.seqs, self.positions, self.ranges, self.scale, self.token_leaf)
        return dq, delta, *kv_function(self.do, self.q, self.k, self.v, *args)


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "case",
    [
        Packed((7,), 2, 1, 8, 4, 4),
        Packed((13, 1, 6), 4, 2, 8, 4, 4),
        Packed((21, 9), 3, 3, 12, 4, 8),
        Packed((11,), 6, 1, 20, 8, 4),
        Packed((5, 5), 1, 1, 3, 2, 2),
    ],
)
def test_equal_to_the_reference(case):
    saved = case.forward()
    assert equal(saved, case.forward(attention.forward_reference))
    references = attention.backward_q_reference, attention.backward_kv_reference
    assert equal(case.backward(saved), case.backward(saved, *references))


def decoded(case: Packed, chunks: list[int]) -> Tensor:
    """Output of the first sequence when its rows come in chunks, against a cache that holds no later key (NaN beyond)."""
    capacity, n = sum(chunks) + 5, sum(chunks)
    cache = torch.full((2, case.kv_heads, capacity, case.head_dim), math.nan).transpose(1, 2)  # head stride > row stride
    parts, start = [], 0
    for size in chunks:
        stop = start + size
        cache[0, start:stop], cache[1, start:stop] = case.k[start:stop], case.v[start:stop]
        seqs = torch.tensor([(0, size, 0, stop)])
        positions = torch.arange(start, stop, dtype=torch.int32)
        parts.append(attention.forward(case.q[start:stop], cache[0], cache[1], seqs, positions, case.scale, case.kv_leaf)[0])
        start = stop
    assert start == n
    return torch.cat(parts)


@pytest.mark.parametrize("heads", [(4, 2, 16), (3, 1, 64), (5, 5, 8), (8, 1, 12)])
def test_decoding_equals_prefill_equals_chunked_prefill(heads):
    case = Packed((70,), *heads)
    whole = case.forward()[0]
    for chunks in ([1] * 70, [33, 1, 1, 1, 17, 17], [2, 68], [69, 1]):
        assert torch.equal(decoded(case, chunks), whole), chunks


def test_torch_fails_the_same_check():
    case = Packed((70,), 4, 4, 64)
    q, k, v = (t.transpose(0, 1).contiguous() for t in (case.q, case.k, case.v))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    rows = [F.scaled_dot_product_attention(q[:, i : i + 1], k[:, : i + 1], v[:, : i + 1]) for i in range(70)]
    assert not torch.equal(torch.cat(rows, 1), whole)


def test_packing_does_not_matter():
    case = Packed((30, 1, 55, 16))
    saved = case.forward()
    grads = case.backward(saved)
    for i, (a, n) in enumerate(zip(case.starts, case.lengths)):
        alone = Packed((n,))
        alone.q, alone.k, alone.v, alone.do = (t[a : a + n] for t in (case.q, case.k, case.v, case.do))
        own = alone.forward()
        assert equal(own, [t[a : a + n] for t in saved]), i
        assert equal(alone.backward(own), [t[a : a + n] for t in grads]), i


def test_context_parallel_rows_and_key_ranges():
    """Ranks own scattered query tiles; each computes dq of its rows, and dk and dv of its key ranges from gathered rows."""
    case = Packed((90, 41))
    saved = case.forward()
    dq, delta, dk, dv = case.backward(saved)
    for ranks in (2, 3):
        for rank in range(ranks):
            rows, seqs, ranges, keys = [], [], [], []
            for i, (start, n) in enumerate(zip(case.starts, case.lengths)):
                tiles = [(a, min(a + TOKEN_LEAF, n)) for a in range(0, n, TOKEN_LEAF)][rank::ranks]
                own = [start + p for a, b in tiles for p in range(a, b)]
                seqs.append((len(rows), len(rows) + len(own), start, n))
                rows += own
                ranges += [(i, a, b) for a, b in tiles]
                keys += own
            local = [t[rows] for t in (case.q, case.do, *saved)]
            table, positions = torch.tensor(seqs), case.positions[rows]
            o, m, norm = attention.forward(local[0], case.k, case.v, table, positions, case.scale, KV_LEAF)
            assert equal((o, m, norm), local[2:])
            own_dq = attention.backward_q(local[1], local[0], case.k, case.v, o, m, norm, table, positions, case.scale, KV_LEAF)
            assert equal(own_dq, (dq[rows], delta[rows]))
            gathered = (case.do, case.q, case.k, case.v, *saved[1:], delta, case.seqs, case.positions)
            assert equal(attention.backward_kv(*gathered, torch.tensor(ranges), case.scale, TOKEN_LEAF), (dk[keys], dv[keys]))
    for a, b in ((0, 1), (3, 60), (89, 90), (5, 5)):
        part = attention.backward_kv(*gathered, torch.tensor([(0, a, b)]), case.scale, TOKEN_LEAF)
        assert equal(part, (dk[a:b], dv[a:b]))


def test_rows_of_no_sequence_are_zero_and_never_read():
    case = Packed((20, 30))
    padded = [torch.full((60, *t.shape[1:]), math.nan) for t in (case.q, case.k, case.v, case.do)]
    for t, own in zip(padded, (case.q, case.k, case.v, case.do)):
        t[5:55] = own
    shifted = Packed((20, 30))
    shifted.q, shifted.k, shifted.v, shifted.do = padded
    shifted.seqs = case.seqs + torch.tensor([5, 5, 5, 0])
    shifted.positions = torch.zeros(60, dtype=torch.int64)
    shifted.positions[5:55] = case.positions
    saved, padded_saved = case.forward(), shifted.forward()
    grads, padded_grads = case.backward(saved), shifted.backward(padded_saved)
    for own, t in zip((*saved, *grads[:2]), (*padded_saved, *padded_grads[:2])):
        assert torch.equal(t[5:55], own)
        assert not t[:5].any() and not t[55:].any()
    assert equal(grads[2:], padded_grads[2:])


@pytest.mark.parametrize("name", build.runnable_builds())
def test_every_build_and_thread_count_gives_the_same_bits(name, monkeypatch):
    cases = [Packed((19, 2)), Packed((9,), 3, 1, 10)] + [Packed((200, 33), 6, 2, 24, 64, 64)] * (name != "scalar")
    expected = [(saved := case.forward(), case.backward(saved)) for case in cases]
    monkeypatch.setattr(build, "_library", build.load(build.build(name)))
    for threads in (1, 2):
        build.set_threads(threads)
        for case, (saved, grads) in zip(cases, expected):
            assert equal(case.forward(), saved)
            assert equal(case.backward(saved), grads)


def test_leaves_are_part_of_the_result():
    """The control: other leaves give other bits, so the equalities above aren't for want of sensitivity."""
    case, other = Packed((200,), 4, 2, 64), Packed((200,), 4, 2, 64, 2 * KV_LEAF, 2 * TOKEN_LEAF)
    saved = case.forward()
    assert not torch.equal(saved[0], other.forward()[0])
    assert [torch.equal(a, b) for a, b in zip(case.backward(saved), other.backward(saved))] == [False, True, False, False]


def test_errors_are_those_of_fp32():
    case = Packed((150,), 4, 2, 32, 64, 64)
    q, k, v = (t.double().requires_grad_() for t in (case.q, case.k, case.v))
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * case.scale
    weights = scores.masked_fill(~torch.ones(150, 150, dtype=torch.bool).tril(), -math.inf).softmax(-1)
    o = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1))
    o.backward(case.do.double())
    saved = case.forward()
    dq, _, dk, dv = case.backward(saved)
    for ours, exact in ((saved[0], o.detach()), (dq, q.grad), (dk, k.grad), (dv, v.grad)):
        assert (ours.double() - exact).norm() < 5e-7 * exact.norm()
    lse = torch.logsumexp(scores.detach()[:, -1], 1)
    assert (saved[1][-1] + saved[2][-1].log() - lse).abs().max() < 1e-5


def test_wrong_arguments():
    case = Packed((9, 4))
    good = {"q": case.q, "k": case.k, "v": case.v, "seqs": case.seqs, "q_pos": case.positions, "scale": 1.0, "kv_leaf": 4}
    for wrong, message in (
        ({"q": case.q[:, :3]}, "don't fit"),
        ({"q": case.q.double()}, "fp32"),
        ({"k": case.k[:-1], "v": case.v[:-1]}, "leaves the rows"),
        ({"v": case.v[:-1]}, "don't fit"),
        ({"k": case.k.transpose(1, 2).contiguous().transpose(1, 2)}, "contiguous last dim"),
        ({"seqs": case.seqs[:, :3]}, "don't fit"),
        ({"q_pos": case.positions - 1}, "sees no key"),
        ({"kv_leaf": 0}, "don't fit"),
    ):
        with pytest.raises(ValueError, match=message):
            attention.forward(**(good | wrong))
    saved = case.forward()
    case.positions[3] = case.positions[2]
    with pytest.raises(ValueError, match="must rise"):
        case.backward(saved)
    case.positions[3] = 3
    case.ranges[0, 2] = 10
    with pytest.raises(ValueError, match="no range of keys"):
        case.backward(saved)
    assert attention.forward(case.q[:0], case.k, case.v, case.seqs[:0], case.positions[:0], 1.0, 4)[0].shape == (0, 4, 16)

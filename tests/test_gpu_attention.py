"""Attention in Triton has the CPU kernels' bits in fp32 and, in either dtype, one result for every schedule (under the interpreter)."""

from __future__ import annotations

import math

import pytest
import torch
from test_attention import Packed, equal

from kernels import attention
from kernels.gpu import attention as gpu

CASES = [Packed((7,), 2, 1, 8, 4, 4), Packed((19, 1, 6), 3, 1, 8, 8, 8), Packed((21, 9), 2, 2, 16, 16, 4)]
LONG = [Packed((41, 23), 4, 2, 16, 8, 8), Packed((70,), 2, 1, 8, 32, 16)]
cases = pytest.mark.parametrize("case", CASES + [pytest.param(case, marks=pytest.mark.slow) for case in LONG])


def forward(case: Packed, **options):
    return gpu.forward(case.q, case.k, case.v, case.seqs, case.positions, case.scale, case.kv_leaf, **options)


def paged(case: Packed, page_size: int):
    """Caches of shuffled pages, NaN where no key lies, and their block table."""
    pages = [-(-n // page_size) for n in case.lengths]
    order = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(0)).tolist()
    table = torch.zeros((len(pages), max(pages) + 1), dtype=torch.int32)
    caches = torch.full((2, len(order) * page_size, *case.k.shape[1:]), math.nan)
    for s, (start, n) in enumerate(zip(case.starts, case.lengths)):
        for p in range(n):
            table[s, p // page_size] = order[sum(pages[:s]) + p // page_size]
            row = int(table[s, p // page_size]) * page_size + p % page_size
            caches[0, row], caches[1, row] = case.k[start + p], case.v[start + p]
    return caches[0], caches[1], table


@cases
@pytest.mark.parametrize("split", [False, True])
def test_forward_has_the_bits_of_the_cpu(case, split):
    assert equal(forward(case, split=split), case.forward())


@cases
def test_backward_has_the_bits_of_the_cpu(case):
    saved = case.forward()
    assert equal(case.backward(saved, gpu.backward_q, gpu.backward_kv), case.backward(saved))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("page_size", [3, 16])
def test_paged_keys_give_the_same_bits(page_size, split):
    case = CASES[2]
    k, v, table = paged(case, page_size)
    arguments = (case.q, k, v, case.seqs, case.positions, case.scale, case.kv_leaf, table, page_size)
    assert equal(gpu.forward(*arguments, split=split, max_len=32), case.forward())


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_decoding_equals_chunked_equals_whole(dtype):
    case = Packed((21,), 2, 1, 8, 8)
    q, k, v = (t.to(dtype) for t in (case.q, case.k, case.v))
    whole = gpu.forward(q, k, v, case.seqs, case.positions, case.scale, 8, split=False)
    for a, b in ((0, 5), (5, 16), (16, 17), (20, 21)):
        seqs = torch.tensor([(0, b - a, 0, b)])
        own = gpu.forward(q[a:b], k, v, seqs, case.positions[a:b], case.scale, 8, split=True)
        assert equal(own, [t[a:b] for t in whole]), (a, b)
    error = (whole[0].float() - case.forward()[0]).norm() / case.forward()[0].norm()
    assert error < (2e-2 if dtype == torch.bfloat16 else 1e-6)


def test_scattered_rows_and_key_ranges():
    """Context parallelism: a rank's rows are every other tile; keys in ranges that begin anywhere."""
    case = Packed((26,), 2, 1, 8, 8, 4)
    saved = case.forward()
    dq, delta, dk, dv = case.backward(saved)
    rows = [p for p in range(26) if p // 4 % 2]
    seqs = torch.tensor([(0, len(rows), 0, 26)])
    own = gpu.forward(case.q[rows], case.k, case.v, seqs, case.positions[rows], case.scale, 8)
    assert equal(own, [t[rows] for t in saved])
    part = gpu.backward_q(case.do[rows], case.q[rows], case.k, case.v, *own, seqs, case.positions[rows], case.scale, 8)
    assert equal(part, (dq[rows], delta[rows]))
    every = (case.do, case.q, case.k, case.v, *saved[1:], delta, case.seqs, case.positions)
    part = gpu.backward_kv(*every, torch.tensor([(0, 13, 26), (0, 3, 5)]), case.scale, 4)
    assert equal(part, [torch.cat((t[13:26], t[3:5])) for t in (dk, dv)])


def test_rows_of_no_sequence_are_zero_and_never_read():
    case = Packed((9,), 2, 1, 8, 8, 8)
    tensors, edge = (case.q, case.k, case.v, case.do), torch.full((3, 2, 8), math.nan)
    q, k, v, do = (torch.cat((edge[:, : t.shape[1]], t, edge[:, : t.shape[1]])) for t in tensors)
    seqs, positions = torch.tensor([(3, 12, 3, 9)]), torch.cat((torch.zeros(3), torch.arange(9), torch.zeros(3))).long()
    saved = gpu.forward(q, k, v, seqs, positions, case.scale, 8)
    grads = gpu.backward_q(do, q, k, v, *saved, seqs, positions, case.scale, 8)
    expected = case.forward()
    for t, own in zip((*saved, *grads), (*expected, *case.backward(expected)[:2])):
        assert torch.equal(t[3:12], own)
        assert not t[:3].any() and not t[12:].any()


def test_another_leaf_has_other_bits():
    """The control: the equalities above aren't for want of sensitivity."""
    case = CASES[1]
    other = attention.forward(case.q, case.k, case.v, case.seqs, case.positions, case.scale, 2 * case.kv_leaf)
    assert not torch.equal(forward(case)[0], other[0])


def test_query_positions_may_lie_beyond_the_keys():
    """Cross-attention to a short cache: the tree over query tiles is deeper than the keys are many."""
    case = Packed((8,), 1, 1, 8, 8, 4)
    case.positions = torch.tensor([0, 5, 9, 30, 100, 101, 160, 300])
    saved = case.forward()
    assert equal(forward(case), saved)
    assert equal(case.backward(saved, gpu.backward_q, gpu.backward_kv), case.backward(saved))

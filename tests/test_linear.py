"""Linear: no bit depends on rows, slices, threads or builds; exact references; weight gradients in any order; errors against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import linear, reduce
from kernels.cpu import build

ROWS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 255)
SCALE = 40


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows_that_differ(product, x: Tensor) -> int:
    """Row counts and offsets whose product differs in a bit from the same rows of the whole."""
    whole = product(x)
    return sum(not torch.equal(product(x[a : a + m]), whole[a : a + m]) for m in ROWS for a in (0, len(x) - m))


@pytest.mark.parametrize(("n", "k"), [(100, 300), (48, 64), (7, 5)])
def test_results_do_not_depend_on_the_number_of_rows(n, k):
    x, dy, w = randn(400, k), randn(400, n), randn(n, k, seed=1)
    assert rows_that_differ(lambda rows: linear.forward(rows, w, 64), x) == 0
    assert rows_that_differ(lambda rows: linear.input_grad(rows, w, 32), dy) == 0


def test_torch_fails_the_same_check():
    x, w = randn(400, 300), randn(100, 300, seed=1)
    assert rows_that_differ(lambda rows: rows @ w.t(), x) > 0


@pytest.mark.parametrize(("m", "n", "k", "leaf"), [(1, 5, 7, 3), (5, 37, 70, 16), (13, 50, 100, 32), (9, 30, 33, 128), (2, 3, 200, 1)])
def test_equal_to_the_reference(m, n, k, leaf):
    x, dy, w = randn(m, k), randn(m, n, seed=1), randn(n, k, seed=2)
    assert torch.equal(linear.forward(x, w, leaf), linear.forward_reference(x, w, leaf))
    assert torch.equal(linear.input_grad(dy, w, leaf), linear.input_grad_reference(dy, w, leaf))
    acc, tiles = torch.ones(n, k, dtype=torch.int64), torch.tensor([0, m // 3, m // 2, m])
    expected = acc.clone()
    linear.accumulate_weight_grad(acc, dy, x, tiles, SCALE)
    linear.accumulate_weight_grad_reference(expected, dy, x, tiles, SCALE)
    assert torch.equal(acc, expected)


def test_the_reference_fma_rounds_once():
    """1 + 2^-12 squared needs 25 bits; fp64 keeps them, and a second rounding at a tie would go the wrong way."""
    a, tiny = 1 + 2.0**-12, 2.0**-60
    exact = linear.fma_reference(torch.tensor(a), torch.tensor(a), torch.tensor(tiny))  # just above the tie 1 + 2^-11 + 2^-24
    assert exact.item() == 1 + 2.0**-11 + 2.0**-23
    assert (torch.tensor(a).double() ** 2 + tiny).float().item() == 1 + 2.0**-11, "the control: rounding twice"


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_tensor_parallel_partials_combine_to_the_whole(parts):
    """A rank holds whole leaves, computes its maximal nodes on slices, and anyone finishes the tree."""
    leaf, leaves = 16, 12
    x, dy, w = randn(20, leaf * leaves), randn(20, leaf * leaves), randn(40, leaf * leaves, seed=1)
    nodes = [node for r in range(parts) for node in reduce.nodes(leaves, leaves * r // parts, leaves * (r + 1) // parts)]
    forward = {(a, b): linear.forward(x[:, a * leaf : b * leaf], w[:, a * leaf : b * leaf], leaf) for a, b in nodes}
    assert torch.equal(reduce.combine(forward, leaves), linear.forward(x, w, leaf))
    tall = randn(leaf * leaves, 40, seed=2)
    grads = {(a, b): linear.input_grad(dy[:, a * leaf : b * leaf], tall[a * leaf : b * leaf], leaf) for a, b in nodes}
    assert torch.equal(reduce.combine(grads, leaves), linear.input_grad(dy, tall, leaf))


def outputs(m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    x, dy, w = (randn(*shape, seed=i).to(dtype) for i, shape in enumerate(((m, k), (m, n), (n, k))))
    acc = torch.zeros(n, k, dtype=torch.int64)
    linear.accumulate_weight_grad(acc, dy, x, torch.tensor([0, m // 4, m]), SCALE)
    return [linear.forward(x, w, 32), linear.input_grad(dy, w, 32), acc]


@pytest.mark.parametrize(("n", "k"), [(100, 300), (7, 5), (33, 64)])
def test_bf16_is_fp32_rounded_once(n, k):
    """Results for bf16 are those for the widened operands, rounded to nearest even; a partial may stay fp32."""
    w16 = randn(n, k, seed=2).bfloat16()
    for m in ROWS:
        x16, dy16 = randn(m, k).bfloat16(), randn(m, n, seed=1).bfloat16()
        for product, a16 in ((linear.forward, x16), (linear.input_grad, dy16)):
            exact = product(a16.float(), w16.float(), 32)
            assert torch.equal(product(a16, w16, 32), exact.bfloat16()), m
            assert torch.equal(product(a16, w16, 32, torch.float32), exact), m
            assert torch.equal(product(a16.float(), w16.float(), 32, torch.bfloat16), exact.bfloat16()), m
            assert not torch.equal(exact.bfloat16().float(), exact), "the control: the rounding shows"
        sums = [torch.ones(n, k, dtype=torch.int64) for _ in range(2)]
        linear.accumulate_weight_grad(sums[0], dy16, x16, torch.tensor([0, m // 3, m]), SCALE)
        linear.accumulate_weight_grad(sums[1], dy16.float(), x16.float(), torch.tensor([0, m // 3, m]), SCALE)
        assert torch.equal(*sums), m


@pytest.mark.parametrize("name", build.runnable_builds())
def test_every_bf16_is_widened_exactly_and_every_fp32_rounded_to_nearest_even(name, monkeypatch):
    """All 65536 bf16 values, and fp32 values at and beside every tie: subnormals, infinities and NaN among them."""
    monkeypatch.setattr(build, "_library", build.load(build.build(name)))
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values, one = (upper + lower).view(torch.float32), torch.ones(1, 1)
        expected, rounded = values.bfloat16(), linear.forward(one, values[:, None], 1, torch.bfloat16)[0]
        number = ~values.isnan()
        assert torch.equal((rounded.view(torch.int16) & 0x7FFF)[number], (expected.view(torch.int16) & 0x7FFF)[number]), lower
        assert rounded[~number].isnan().all(), lower
    every = upper.view(torch.float32).bfloat16()
    widened = linear.forward(one.bfloat16(), every[:, None], 1, torch.float32)[0]
    assert torch.equal(widened.view(torch.int32)[~every.isnan()] & 0x7FFFFFFF, every.float().view(torch.int32)[~every.isnan()] & 0x7FFFFFFF)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", build.runnable_builds())
def test_every_build_and_thread_count_gives_the_same_bits(name, dtype, monkeypatch):
    shapes = [(1, 50, 40), (6, 50, 40), (30, 90, 70)] + [(100, 500, 300)] * (name != "scalar")
    expected = [outputs(*shape, dtype) for shape in shapes]
    monkeypatch.setattr(build, "_library", build.load(build.build(name)))
    for threads in (1, 2, 3, 4):
        build.set_threads(threads)
        for shape, tensors in zip(shapes, expected):
            assert all(torch.equal(a, b) for a, b in zip(outputs(*shape, dtype), tensors)), (shape, threads)


@pytest.mark.parametrize("m", [1, 7, 40])
def test_memory_around_the_operands_is_never_used(m):
    """Row-strided views inside NaN give what contiguous copies give."""
    for n, k in ((50, 70), (16, 32)):
        frames = [torch.full((rows + 2, columns + 5), math.nan) for rows, columns in ((m, k), (m, n), (n, k))]
        views = [frame[1:-1, 2:-3] for frame in frames]
        for i, view in enumerate(views):
            view.copy_(randn(*view.shape, seed=i))
        x, dy, w = views
        assert torch.equal(linear.forward(x, w, 16), linear.forward(x.contiguous(), w.contiguous(), 16))
        assert torch.equal(linear.input_grad(dy, w, 16), linear.input_grad(dy.contiguous(), w.contiguous(), 16))
        acc, copy = torch.zeros(n, k, dtype=torch.int64), torch.zeros(n, k, dtype=torch.int64)
        linear.accumulate_weight_grad(acc, dy, x, torch.tensor([0, m]), SCALE)
        linear.accumulate_weight_grad(copy, dy.contiguous(), x.contiguous(), torch.tensor([0, m]), SCALE)
        assert torch.equal(acc, copy)


def test_weight_gradients_in_any_order_and_split():
    m, n, k = 1200, 30, 50
    dy, x, bounds = randn(m, n), randn(m, k, seed=1), [0, 1, 17, 64, 64, 128, 300, 700, 1000, 1130, m]
    leaves = list(zip(bounds, bounds[1:]))
    whole = torch.zeros(n, k, dtype=torch.int64)
    linear.accumulate_weight_grad(whole, dy, x, torch.tensor(bounds, dtype=torch.int32), SCALE)
    for seed in range(3):
        order = torch.randperm(len(leaves), generator=torch.Generator().manual_seed(seed)).tolist()
        rows = torch.cat([torch.arange(*leaves[i]) for i in order])
        tiles = torch.tensor([0] + [leaves[i][1] - leaves[i][0] for i in order]).cumsum(0)
        mixed = torch.zeros_like(whole)
        linear.accumulate_weight_grad(mixed, dy[rows], x[rows], tiles, SCALE)
        assert torch.equal(mixed, whole)
    ranks = torch.zeros(3, n, k, dtype=torch.int64)  # every leaf on some rank, then an integer sum
    for i, (a, b) in enumerate(leaves):
        linear.accumulate_weight_grad(ranks[i % 3], dy[a:b], x[a:b], torch.tensor([0, b - a]), SCALE)
    assert torch.equal(ranks.sum(0), whole)
    other = torch.zeros_like(whole)
    linear.accumulate_weight_grad(other, dy, x, torch.tensor([0, m]), SCALE)
    assert not torch.equal(other, whole), "the control: other leaves are another sum"


def test_weight_gradients_overflow_loudly():
    one, tiles = torch.ones(1, 1), torch.tensor([0, 1])
    for value, start in ((2.0**21, 0), (-(2.0**21), 0), (math.nan, 0), (math.inf, 0), (1.0, 2**62 - 1), (-1.0, -(2**62))):
        acc = torch.full((1, 1), start)
        with pytest.raises(OverflowError, match="scale 2\\^40"):
            linear.accumulate_weight_grad(acc, one * value, one, tiles, SCALE)
    acc = torch.zeros(1, 1, dtype=torch.int64)
    linear.accumulate_weight_grad(acc, one * (2.0**21 - 0.125), one, tiles, SCALE)
    assert acc.item() == 2**61 - 2**37
    with pytest.raises(OverflowError):  # many leaves that fit one by one
        linear.accumulate_weight_grad(acc, torch.full((9, 1), 2.0**20), torch.ones(9, 1), torch.arange(10), SCALE)


def test_large_and_tiny_values_round_half_to_even():
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 2.0**52 + 2.0**30, -(2.0**60), 0.49999997])
    acc = torch.zeros(1, 8, dtype=torch.int64)
    linear.accumulate_weight_grad(acc, torch.ones(1, 1), values[None], torch.tensor([0, 1]), 0)
    assert acc[0].tolist() == [0, 2, 2, 0, -2, 2**52 + 2**30, -(2**60), 0]


def test_errors_are_those_of_fp32():
    x, dy, w = randn(300, 1000), randn(300, 200, seed=1), randn(200, 1000, seed=2)
    acc = torch.zeros(200, 1000, dtype=torch.int64)
    linear.accumulate_weight_grad(acc, dy, x, torch.arange(0, 301, 60), SCALE)
    pairs = (
        (linear.forward(x, w, 128), x.double() @ w.double().t()),
        (linear.input_grad(dy, w, 128), dy.double() @ w.double()),
        (reduce.from_fixed(acc, SCALE), dy.double().t() @ x.double()),
    )
    assert all((ours.double() - exact).norm() < 4e-7 * exact.norm() for ours, exact in pairs)


def test_empty_operands_and_wrong_ones():
    assert linear.forward(torch.zeros(0, 5), randn(4, 5), 2).shape == (0, 4)
    assert linear.input_grad(torch.zeros(0, 4), randn(4, 5), 2).shape == (0, 5)
    assert torch.equal(linear.forward(torch.zeros(2, 0), torch.zeros(3, 0), 2), torch.zeros(2, 3))
    acc = torch.ones(4, 5, dtype=torch.int64)
    linear.accumulate_weight_grad(acc, torch.zeros(0, 4), torch.zeros(0, 5), torch.tensor([0]), SCALE)
    assert torch.equal(acc, torch.ones(4, 5, dtype=torch.int64))
    for call in (
        lambda: linear.forward(randn(2, 5), randn(4, 6), 2),
        lambda: linear.forward(randn(2, 5), randn(4, 5), 0),
        lambda: linear.forward(randn(2, 5).double(), randn(4, 5), 2),
        lambda: linear.forward(randn(5, 2).t(), randn(4, 5), 2),
        lambda: linear.forward(randn(5), randn(4, 5), 2),
        lambda: linear.forward(randn(2, 5), randn(4, 5).bfloat16(), 2),
        lambda: linear.forward(randn(2, 5), randn(4, 5), 2, torch.float64),
        lambda: linear.input_grad(randn(2, 5), randn(4, 5), 2),
        lambda: linear.accumulate_weight_grad(acc, randn(3, 4), randn(3, 5), torch.tensor([0, 2]), SCALE),
        lambda: linear.accumulate_weight_grad(acc, randn(3, 4), randn(3, 5), torch.tensor([0, 2, 1, 3]), SCALE),
        lambda: linear.accumulate_weight_grad(acc.int(), randn(3, 4), randn(3, 5), torch.tensor([0, 3]), SCALE),
    ):
        with pytest.raises(ValueError):
            call()


def test_operands_on_different_devices_are_refused():
    here, elsewhere = randn(4, 4), torch.zeros(4, 4, device="meta")
    acc, tiles = torch.zeros(4, 4, dtype=torch.int64), torch.tensor([0, 4])
    for call in (
        lambda: linear.forward(here, elsewhere, 2),
        lambda: linear.input_grad(elsewhere, here, 2),
        lambda: linear.accumulate_weight_grad(acc, here, elsewhere, tiles, SCALE),
        lambda: linear.accumulate_weight_grad(acc.to("meta"), here, here, tiles, SCALE),
    ):
        with pytest.raises(ValueError, match="different devices"):
            call()

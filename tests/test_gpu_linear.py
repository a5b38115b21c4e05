"""Linear and exact sums in Triton, under the interpreter: both schedules have the CPU's bits."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import linear, reduce
from kernels.gpu import linear as gpu
from kernels.gpu import reduce as gpu_reduce

SCALE = 40
SHAPES = [(1, 5, 7, 3), (2, 18, 70, 16), (3, 20, 100, 16), (5, 7, 33, 32), (17, 10, 48, 16), (33, 3, 20, 3)]  # M, N, K, leaf


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product(x, w, leaf, split, dtype=None):
    return gpu._product(x, w, len(w), w.stride(0), 1, leaf, dtype, split)


@pytest.mark.parametrize(("m", "n", "k", "leaf"), SHAPES)
def test_both_schedules_have_the_bits_of_the_cpu(m, n, k, leaf):
    x, w = randn(m, k), randn(n, k, seed=1)
    expected = linear.forward(x, w, leaf)
    assert all(torch.equal(product(x, w, leaf, split), expected) for split in (0, 1, 9))
    assert torch.equal(gpu.forward(x, w, leaf), expected)
    assert leaf >= k or not torch.equal(product(x, w, leaf + 1, 0), expected), "the control: another leaf, another sum"


@pytest.mark.parametrize(("m", "n", "k", "leaf"), SHAPES[:3])
def test_gradients_have_the_bits_of_the_cpu(m, n, k, leaf):
    dy, x, w = randn(m, n), randn(m, k, seed=1), randn(n, k, seed=2)
    assert torch.equal(gpu.input_grad(dy, w, leaf), linear.input_grad(dy, w, leaf))
    acc = torch.full((n, k), 5)
    expected = acc.clone()
    tiles = torch.tensor([0, m // 3, m // 2, m])
    gpu.accumulate_weight_grad(acc, dy, x, tiles, SCALE)
    linear.accumulate_weight_grad(expected, dy, x, tiles, SCALE)
    assert torch.equal(acc, expected)


def test_weight_gradients_over_uneven_leaves():
    dy, x, tiles = randn(70, 18), randn(70, 20, seed=1), torch.tensor([0, 1, 17, 17, 50, 70])
    acc, expected, other = (torch.zeros(18, 20, dtype=torch.int64) for _ in range(3))
    gpu.accumulate_weight_grad(acc, dy, x, tiles, SCALE)
    linear.accumulate_weight_grad(expected, dy, x, tiles, SCALE)
    gpu.accumulate_weight_grad(other, dy, x, torch.tensor([0, 70]), SCALE)
    assert torch.equal(acc, expected)
    assert not torch.equal(other, expected), "the control: other leaves are another sum"


def test_rows_inside_nan_and_tensor_parallel_slices():
    leaf, leaves = 16, 6
    frames = [torch.full((rows + 2, leaf * leaves + 5), math.nan) for rows in (5, 18)]
    x, w = (frame[1:-1, 2:-3] for frame in frames)
    x.copy_(randn(*x.shape))
    w.copy_(randn(*w.shape, seed=1))
    expected = linear.forward(x, w, leaf)
    assert torch.equal(gpu.forward(x, w, leaf), expected)
    nodes = [node for r in range(4) for node in reduce.nodes(leaves, leaves * r // 4, leaves * (r + 1) // 4)]
    parts = {(a, b): gpu.forward(x[:, a * leaf : b * leaf], w[:, a * leaf : b * leaf], leaf, torch.float32) for a, b in nodes}
    assert torch.equal(reduce.combine(parts, leaves), expected)


def test_bf16_storage_is_the_widened_product():
    x, w = randn(5, 70).bfloat16(), randn(18, 70, seed=1).bfloat16()
    expected = linear.forward(x.float(), w.float(), 16)
    assert all(torch.equal(product(x, w, 16, split, torch.float32), expected) for split in (0, 9))


def test_padding_keeps_minus_zero():
    """A product that underflows leaves -0 behind, and the padding of the last block may not turn it into +0."""
    x, w = torch.tensor([[-1e-30, 0.0]]), torch.tensor([[1e-30, -0.0]])
    assert math.copysign(1, gpu.forward(x, w, 2).item()) == math.copysign(1, linear.forward(x, w, 2).item()) == -1


def test_overflow_is_loud():
    one, tiles = torch.ones(1, 1), torch.tensor([0, 1])
    for value, start in ((2.0**21, 0), (-(2.0**21), 0), (math.nan, 0), (math.inf, 0), (1.0, 2**62 - 1), (-1.0, -(2**62))):
        with pytest.raises(OverflowError, match="scale 2\\^40"):
            gpu.accumulate_weight_grad(torch.full((1, 1), start), one * value, one, tiles, SCALE)
    acc = torch.zeros(1, 1, dtype=torch.int64)
    gpu.accumulate_weight_grad(acc, one * (2.0**21 - 0.125), one, tiles, SCALE)
    assert acc.item() == 2**61 - 2**37


def test_empty_operands():
    assert gpu.forward(torch.zeros(0, 5), randn(4, 5), 2).shape == (0, 4)
    assert torch.equal(gpu.forward(torch.zeros(2, 0), torch.zeros(3, 0), 2), torch.zeros(2, 3))
    acc = torch.ones(4, 5, dtype=torch.int64)
    gpu.accumulate_weight_grad(acc, torch.zeros(0, 4), torch.zeros(0, 5), torch.tensor([0]), SCALE)
    assert torch.equal(acc, torch.ones(4, 5, dtype=torch.int64))


def test_exact_sums():
    x = randn(3000) * torch.exp2((torch.arange(3000) % 40 - 30).float())
    fixed = reduce.to_fixed(x, SCALE)
    assert torch.equal(gpu_reduce.to_fixed(x, SCALE), fixed)
    assert torch.equal(gpu_reduce.from_fixed(fixed, SCALE, 7.0), reduce.from_fixed(fixed, SCALE, 7.0))
    assert not torch.equal(gpu_reduce.from_fixed(fixed, SCALE, 7.0), reduce.from_fixed(fixed, SCALE, 7.5)), "the control: another divisor"
    assert gpu_reduce.max_bits(x) == int(x.abs().max().view(torch.int32))
    for scale in (1.0, 2.0**-120, 2.0**100):
        exponent, limbs = reduce.max_exponent([x * scale]), torch.zeros(2, dtype=torch.int64)
        gpu_reduce.add_square_limbs(x * scale, exponent, limbs)
        assert torch.equal(limbs, reduce.square_limbs([x * scale], exponent))
    for value in (2.0**21, math.nan, math.inf):
        with pytest.raises(OverflowError):
            gpu_reduce.to_fixed(torch.tensor([value]), SCALE)
    with pytest.raises(OverflowError):
        gpu_reduce.from_fixed(torch.tensor([2**62]), SCALE)

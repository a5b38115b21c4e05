"""Fixed trees and exact sums: their bits depend on the leaves alone. Controls show that ordinary float sums do not pass."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kernels import reduce


def float_leaves(n: int, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(7, 5, generator=g) * 10.0 ** (i % 5 - 2) for i in range(n)]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 9, 24, 31])
def test_any_split_of_the_leaves_gives_the_same_root(n):
    leaves = float_leaves(n)
    root = reduce.halving(0, n, leaves.__getitem__)
    for ranks in (1, 2, 3, 4, 7):
        cuts = [n * r // ranks for r in range(ranks + 1)]
        own = [reduce.nodes(n, a, b) for a, b in itertools.pairwise(cuts)]
        parts = {(lo, hi): reduce.halving(lo, hi, leaves.__getitem__) for rank in own for lo, hi in rank}
        assert torch.equal(reduce.combine(parts, n), root)


def test_a_running_sum_differs_from_the_tree():
    leaves = float_leaves(24)
    assert not torch.equal(sum(leaves[1:], leaves[0]), reduce.halving(0, 24, leaves.__getitem__))


def test_nodes_cover_the_range_and_a_missing_leaf_is_named():
    assert reduce.nodes(9, 3, 9) == [(3, 4), (4, 9)]
    assert reduce.nodes(0, 0, 0) == [] and reduce.nodes(4, 2, 2) == []
    with pytest.raises(KeyError, match="leaf 2 of 4"):
        reduce.combine({(0, 2): 1.0, (3, 4): 1.0}, 4, lambda a, b: a + b)


def test_aligned_tree_keeps_its_nodes_when_leaves_are_appended_and_skips_absent_ones():
    words = {i: str(i) for i in range(6)}
    assert reduce.aligned(words, lambda a, b: f"({a}{b})") == "(((01)(23))(45))"
    assert reduce.aligned({1: "1", 6: "6"}, lambda a, b: f"({a}{b})") == "(16)"
    assert reduce.aligned({0: "0"}, lambda a, b: a + b) == "0"


def test_fixed_point_rounds_half_to_even_and_equals_the_reference():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -0.0, 3.0, 1e-45, 0.49999997])
    assert reduce.to_fixed(x, 0).tolist() == [0, 2, 2, 0, -2, 0, 3, 0, 0]
    y = torch.cat([t.flatten() for t in float_leaves(9)])
    for scale in (-3, 0, 20, 40, 46):
        assert torch.equal(reduce.to_fixed(y, scale), reduce.to_fixed_reference(y, scale))
    assert torch.equal(reduce.from_fixed(reduce.to_fixed(y, 40), 40), (reduce.to_fixed_reference(y, 40).double() / 2.0**40).float())
    big = torch.randint(-(1 << 61), 1 << 61, (1000,), generator=torch.Generator().manual_seed(3))
    assert torch.equal(reduce.from_fixed(big, 40, 3.0), reduce.from_fixed_reference(big, 40, 3.0))
    assert reduce.from_fixed(torch.tensor([7 << 40]), 40, 3.0).item() == torch.tensor(7 / 3, dtype=torch.float32).item()
    assert reduce.to_fixed(torch.empty(0, 3), 40).shape == (0, 3)


@pytest.mark.parametrize("bad", [2.0**21, -(2.0**21), math.inf, math.nan])
def test_fixed_point_raises_instead_of_saturating(bad):
    x = torch.ones(100)
    x[71] = bad
    with pytest.raises(OverflowError):
        reduce.to_fixed(x, 40)
    with pytest.raises(OverflowError):
        reduce.from_fixed(torch.tensor([1 << 62]), 40)


def test_exact_sum_is_free_of_order_and_a_float_sum_is_not():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(5000, generator=g) * 10.0 ** torch.randint(-8, 8, (5000,), generator=g)
    orders = [torch.randperm(5000, generator=g) for _ in range(4)]
    assert len({reduce.exact_sum(x[o]) for o in orders}) == 1
    assert len({sum(x[o].tolist()) for o in orders}) > 1
    assert reduce.exact_sum(torch.empty(0)) == 0.0
    with pytest.raises(OverflowError):
        reduce.exact_sum(torch.tensor([1.0, math.inf]))


def norm_of(tensors: list[torch.Tensor]) -> float:
    exponent = reduce.max_exponent(tensors)
    return reduce.norm_from_limbs(reduce.square_limbs(tensors, exponent), exponent)


def test_exact_norm_is_free_of_order_and_of_cuts_and_accurate():
    g = torch.Generator().manual_seed(2)
    x = torch.randn(40001, generator=g) * 10.0 ** torch.randint(-12, 4, (40001,), generator=g)
    whole = norm_of([x])
    assert whole == pytest.approx(x.double().norm().item(), rel=1e-14)
    exponent = reduce.max_exponent([x])
    assert torch.equal(reduce.square_limbs([x, x], exponent), reduce.square_limbs_reference([x, x], exponent))
    for parts in (2, 3, 7):
        pieces = list(x[torch.randperm(len(x), generator=g)].tensor_split(parts))
        assert max(reduce.max_exponent([p]) for p in pieces) == exponent
        limbs = sum(reduce.square_limbs([p], exponent) for p in pieces)
        assert reduce.norm_from_limbs(limbs, exponent) == whole


def test_exact_norm_at_the_edges():
    assert norm_of([torch.zeros(3)]) == 0.0 and norm_of([]) == 0.0
    assert norm_of([torch.tensor([3.0, -4.0])]) == 5.0
    assert norm_of([torch.tensor([2.0**-149])]) == 2.0**-149  # no flush to zero
    assert norm_of([torch.full((4,), 3e38)]) == pytest.approx(6e38, rel=1e-7)
    assert reduce.max_exponent([torch.tensor([1.0])]) == 1 and reduce.max_exponent([torch.tensor([0.0, 0.75])]) == 0
    with pytest.raises(OverflowError, match="finite"):
        norm_of([torch.tensor([1.0, math.nan])])

"""Elementary functions: within their stated error of fp64, and the same bits wherever an element sits. libm-backed ones fail that."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import elementwise

FUNCTIONS = {
    "exp": (torch.exp, (-103.0, 88.7)),
    "log": (torch.log, (1e-44, 3e38)),
    "sqrt": (torch.sqrt, (0.0, 3e38)),
    "rsqrt": (torch.rsqrt, (1e-38, 3e38)),
    "silu": (lambda x: x / (1 + torch.exp(-x)), (-80.0, 80.0)),
}


def arguments(name: str, n: int = 200_003) -> torch.Tensor:
    """Evenly spread over the fp32 numbers of the range by value (exp, silu) or by exponent (the others)."""
    lo, hi = FUNCTIONS[name][1]
    if lo < 0:
        return torch.cat([torch.linspace(lo, hi, n), torch.linspace(-1, 1, n)])
    return torch.linspace(math.log(max(lo, 1e-44)), math.log(hi), n, dtype=torch.float64).exp().float()


def ulps(y: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error in units of the last place of fp32."""
    spacing = torch.ldexp(torch.ones_like(exact), torch.frexp(exact.abs().clamp_min(2.0**-126)).exponent - 24)
    return ((y.double() - exact).abs() / spacing).max().item()


@pytest.mark.parametrize(("name", "bound"), [("exp", 1.0), ("log", 1.0), ("sqrt", 0.5), ("rsqrt", 1.5), ("silu", 3.0)])
def test_error_against_fp64(name, bound):
    x = arguments(name)
    y, exact = getattr(elementwise, name)(x), FUNCTIONS[name][0](x.double())
    assert ulps(y, exact) <= bound + 1e-6
    assert ulps(y * (1 + 2.0**-20), exact) > bound  # the measure would see a worse function


@pytest.mark.parametrize("name", FUNCTIONS)
def test_position_in_the_tensor_does_not_matter(name):
    x = arguments(name)[:1037]
    function = getattr(elementwise, name)
    whole = function(x)
    for step in (1, 7, 16, 250):
        assert torch.equal(torch.cat([function(x[i : i + step]) for i in range(0, len(x), step)]), whole)
    assert torch.equal(function(x[1:1001].view(10, 100).t()).t().reshape(-1), whole[1:1001])
    assert function(x[:0]).shape == (0,)


def test_edges():
    inf, nan = math.inf, math.nan
    assert elementwise.exp(torch.tensor([-inf, -200.0, 0.0, 89.0, inf])).tolist() == [0.0, 0.0, 1.0, inf, inf]
    assert elementwise.log(torch.tensor([0.0, 1.0, inf])).tolist() == [-inf, 0.0, inf]
    assert all(getattr(elementwise, name)(torch.tensor([nan])).isnan() for name in FUNCTIONS)
    with pytest.raises(ValueError, match="float64"):
        elementwise.exp(torch.zeros(1, dtype=torch.float64))


def test_the_callers_rounding_mode_does_not_matter():
    x = torch.tensor([-100.0, -88.0])  # exp is subnormal
    expected = elementwise.exp(x).view(torch.int32).tolist()
    assert min(expected) > 0
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        assert x.double().exp().float().view(torch.int32).tolist() == [0, 0]  # the mode is on: torch flushes
        assert elementwise.exp(x).view(torch.int32).tolist() == expected
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equal_to_the_reference(name):
    """Over random bit patterns, subnormal numbers, infinities and NaN among them, and over the range where the function is at work."""
    patterns = torch.randint(-(2**31), 2**31, (1 << 18,), generator=torch.Generator().manual_seed(0)).to(torch.int32).view(torch.float32)
    x = torch.cat([patterns, arguments(name), torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])])
    y, reference = getattr(elementwise, name)(x), getattr(elementwise, f"{name}_reference")(x)
    assert same_bits(y, reference)
    nudged = getattr(elementwise, f"{name}_reference")(x * (1 + 2.0**-23))
    assert not same_bits(y, nudged), "the control: one unit in the last place of the arguments shows"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())

"""The functions every Triton kernel is built from give the CPU kernels' bits, under the interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels import elementwise, linear, reduce
from kernels.gpu import math

FUNCTIONS = ("exp", "log", "silu", "rsqrt", "sqrt")


@triton.jit
def map_kernel(x_ptr, y_ptr, n, F: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=1.0)
    if F == 0:
        y = math.exp(x)
    elif F == 1:
        y = math.log(x)
    elif F == 2:
        y = math.silu(x)
    elif F == 3:
        y = math.rsqrt(x)
    else:
        y = math.sqrt(x)
    tl.store(y_ptr + i, y, mask=i < n)


@triton.jit
def fixed_kernel(x_ptr, y_ptr, scale_log2, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, math.fixed(tl.load(x_ptr + i), scale_log2))


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, SIZE: tl.constexpr, K: tl.constexpr):
    i, k = tl.arange(0, SIZE), tl.arange(0, K)
    a, b = tl.load(a_ptr + i[:, None] * K + k[None, :]), tl.load(b_ptr + i[None, :] * K + k[:, None])
    tl.store(c_ptr + i[:, None] * SIZE + i[None, :], math.dot(a, b, tl.zeros((SIZE, SIZE), tl.float32)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_bits_of_the_cpu(name):
    """Over random bit patterns: subnormal numbers, infinities and NaN among them."""
    patterns = torch.randint(-(2**31), 2**31, (1 << 16,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    x = torch.cat([patterns.view(torch.float32), torch.linspace(-110, 95, 1 << 15)])
    y, expected = torch.empty_like(x), getattr(elementwise, name)(x)
    map_kernel[(1,)](x, y, len(x), FUNCTIONS.index(name), 1 << 17, **math.LAUNCH)
    assert bool(((y.view(torch.int32) == expected.view(torch.int32)) | (y.isnan() & expected.isnan())).all())
    assert not torch.equal(getattr(torch, name, torch.nn.functional.silu)(x), expected), "the control: other functions have other bits"


def test_fixed_point_rounds_as_on_the_cpu():
    exponents = torch.arange(4096) % 69 - 48
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * torch.exp2(exponents.float())
    x[:4] = torch.tensor([0.5, 1.5, -0.5, -2.5]) * 2.0**-40
    y = torch.empty(4096, dtype=torch.int64)
    fixed_kernel[(1,)](x, y, 40, 4096, **math.LAUNCH)
    assert torch.equal(y, reduce.to_fixed(x, 40))


def test_dot_is_one_chain_of_fmas():
    a, b, c = torch.randn(16, 32), torch.randn(16, 32), torch.empty(16, 16)
    dot_kernel[(1,)](a, b, c, 16, 32, **math.LAUNCH)
    assert torch.equal(c, linear.forward(a, b, 32))
    assert not torch.equal(c, linear.forward(a, b, 16)), "the control: a tree of two chains is another sum"
    dot_kernel[(1,)](a.bfloat16(), b.bfloat16(), c, 16, 32, **math.LAUNCH)
    assert torch.equal(c, linear.forward(a.bfloat16().float(), b.bfloat16().float(), 32))

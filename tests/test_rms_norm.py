"""RMS norm: right within fp32 error, and no bit depends on the number of rows, on their place, on strides or on the split of tokens."""

from __future__ import annotations

import pytest
import torch

from kernels import rms_norm

EPS = 1e-6


def case(m: int = 37, g: int = 3, d: int = 64, seed: int = 0) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(m, g, d, generator=gen) for _ in range(2))
    return x * 3, dy, 1 + 0.1 * torch.randn(d, generator=gen)


@pytest.mark.parametrize(("g", "d"), [(1, 576), (3, 64), (2, 40), (4, 5), (1, 17)])
def test_against_fp64(g, d):
    x, dy, w = case(g=g, d=d)
    y, rstd = rms_norm.forward(x, w, EPS)
    acc = torch.zeros(d, dtype=torch.int64)
    dx = rms_norm.backward(dy, x, w, rstd, acc, torch.tensor([0, 20, 37]), 40)
    x64, w64 = x.double().requires_grad_(), w.double().requires_grad_()
    rstd64 = torch.rsqrt(x64.square().mean(-1) + EPS)
    y64 = x64 * rstd64[..., None] * w64
    (y64 * dy).sum().backward()
    for ours, exact in ((y, y64), (rstd, rstd64), (dx, x64.grad), (acc.double() * 2.0**-40, w64.grad)):
        torch.testing.assert_close(ours.double(), exact.detach(), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(("g", "d"), [(1, 576), (3, 64), (2, 40), (4, 5), (1, 17)])
def test_equal_to_the_reference(g, d):
    x, dy, w = case(g=g, d=d)
    results = []
    for forward, backward in ((rms_norm.forward, rms_norm.backward), (rms_norm.forward_reference, rms_norm.backward_reference)):
        y, rstd = forward(x, w, EPS)
        acc = torch.zeros(d, dtype=torch.int64)
        results.append((y, rstd, backward(dy, x, w, rstd, acc, torch.tensor([0, 20, 37]), 40), acc))
    assert all(map(torch.equal, *results))
    rows = x.square().sum(-1) / d  # the control: another order of the same sum
    assert g * d < 20 or not torch.equal(1 / torch.sqrt(rows + EPS), results[0][1])


def test_hidden_norm_takes_two_dims():
    x, _, w = case(g=1)
    assert torch.equal(rms_norm.forward(x[:, 0], w, EPS)[0], rms_norm.forward(x, w, EPS)[0][:, 0])
    assert rms_norm.forward(x[:, 0], w, EPS)[1].shape == (37, 1)


def test_rows_stand_alone_and_strides_do_not_matter():
    x, dy, w = case()
    y, rstd = rms_norm.forward(x, w, EPS)
    dx = rms_norm.backward(dy, x, w, rstd)
    packed = torch.cat([torch.zeros(37, 2, 64), x, dy], dim=1)  # as q of a packed q, k, v
    assert torch.equal(rms_norm.forward(packed[:, 2:5], w, EPS)[0], y)
    assert torch.equal(rms_norm.backward(packed[:, 5:], packed[:, 2:5], w, rstd), dx)
    for a, b in ((0, 1), (5, 12), (36, 37), (4, 4)):
        assert torch.equal(rms_norm.forward(x[a:b], w, EPS)[0], y[a:b])
        assert torch.equal(rms_norm.backward(dy[a:b], x[a:b], w, rstd[a:b]), dx[a:b])
    heads = [rms_norm.forward(x[:, i : i + 1], w, EPS)[0] for i in range(3)]
    assert torch.equal(torch.cat(heads, dim=1), y)


def test_weight_gradient_adds_leaves_in_any_order_and_place():
    x, dy, w = case(d=100)
    rstd = rms_norm.forward(x, w, EPS)[1]
    whole = torch.zeros(100, dtype=torch.int64)
    rms_norm.backward(dy, x, w, rstd, whole, torch.tensor([0, 8, 8, 16, 37]), 40)
    parts = torch.zeros(100, dtype=torch.int64)
    for a, b in ((16, 37), (0, 8), (8, 16)):
        for h in (2, 0, 1):  # tensor-parallel ranks hold some heads each
            s = (slice(a, b), slice(h, h + 1))
            rms_norm.backward(dy[s], x[s], w, rstd[s].contiguous(), parts, torch.tensor([0, b - a], dtype=torch.int32), 40)
    assert torch.equal(parts, whole)
    other = torch.zeros(100, dtype=torch.int64)
    rms_norm.backward(dy, x, w, rstd, other, torch.tensor([0, 9, 16, 37]), 40)
    assert not torch.equal(other, whole)  # other leaves, other bits


@pytest.mark.parametrize(("g", "d"), [(1, 576), (4, 5), (2, 40)])
def test_bf16_is_fp32_of_the_widened_rows_rounded_once(g, d):
    x, dy, w = (t.bfloat16() for t in case(g=g, d=d))
    x32, dy32, w32 = x.float(), dy.float(), w.float()
    (y, rstd), (y32, rstd32) = rms_norm.forward(x, w, EPS), rms_norm.forward(x32, w32, EPS)
    accs = [torch.zeros(d, dtype=torch.int64) for _ in range(2)]
    tiles = torch.tensor([0, 20, 37])
    dx, dx32 = rms_norm.backward(dy, x, w, rstd, accs[0], tiles, 40), rms_norm.backward(dy32, x32, w32, rstd, accs[1], tiles, 40)
    assert y.dtype == dx.dtype == torch.bfloat16 and torch.equal(y, y32.bfloat16()) and torch.equal(dx, dx32.bfloat16())
    assert torch.equal(rstd, rstd32) and torch.equal(*accs)
    normed = (x32 * rstd[..., None]).bfloat16().float() * w32
    assert d < 40 or not torch.equal(y, normed.bfloat16()), "the control: a rounding in between shows"


def test_errors():
    x, dy, w = case()
    rstd = rms_norm.forward(x, w, EPS)[1]
    acc = torch.zeros(64, dtype=torch.int64)
    with pytest.raises(OverflowError, match="2\\^40"):
        rms_norm.backward(dy * 1e8, x, w, rstd, acc, torch.tensor([0, 37]), 40)
    with pytest.raises(ValueError, match="they end at 38"):
        rms_norm.backward(dy, x, w, rstd, acc, torch.tensor([0, 38]), 40)
    with pytest.raises(ValueError, match="fp32"):
        rms_norm.forward(x.double(), w, EPS)
    with pytest.raises(ValueError, match="bfloat16 \\[64\\]"):
        rms_norm.forward(x.bfloat16(), w, EPS)
    with pytest.raises(ValueError, match="different devices"):
        rms_norm.forward(x, w.to("meta"), EPS)


@pytest.mark.parametrize("tiles", [[0, 9], [0, 9, 2], [-1, 4], [0, 3, 2, 4]])
def test_tiles_that_leave_the_rows_are_refused(tiles):
    x, w, acc = torch.ones(4, 8), torch.ones(8), torch.zeros(8, dtype=torch.int64)
    with pytest.raises(ValueError, match="tiles must rise"):
        rms_norm.backward(x, x, w, torch.ones(4, 1), acc, torch.tensor(tiles), 40)

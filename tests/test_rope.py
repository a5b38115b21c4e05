"""Rotary embedding: tables correctly rounded against 60-digit arithmetic, rotation right and free of batch, strides and place."""

from __future__ import annotations

import pytest
import torch

from kernels import rope


def test_tables_against_fp64():
    cos, sin = rope.tables(64, 5000, 1e6)
    frequency = 1e6 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    angle = torch.arange(5000, dtype=torch.float64)[:, None] * frequency
    assert cos.shape == sin.shape == (5000, 32) and cos.dtype == torch.float32
    # fp64 libm and our series agree but for values that lie within about 1e-12 of a rounding boundary
    assert (cos != angle.cos().float()).sum() <= 1 and (sin != angle.sin().float()).sum() <= 1
    assert torch.equal(rope.tables(64, 10, 1e6)[0], cos[:10])
    assert cos[0].eq(1).all() and sin[0].eq(0).all()


def case() -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(0)
    return torch.randn(19, 3, 24, generator=gen), torch.randint(0, 100, (19,), generator=gen), *rope.tables(24, 100, 1e4)


def test_apply_against_fp64_and_inverse():
    x, positions, cos, sin = case()
    y = rope.apply(x, positions, cos, sin)
    torch.testing.assert_close(y.double(), rope.apply_reference(x.double(), positions, cos, sin), rtol=0, atol=1e-6)
    torch.testing.assert_close(rope.apply(y, positions, cos, sin, inverse=True), x, rtol=0, atol=1e-6)
    back = rope.apply_reference(x.double(), positions, cos, sin, inverse=True)
    torch.testing.assert_close(rope.apply(x, positions, cos, sin, inverse=True).double(), back, rtol=0, atol=1e-6)
    assert not torch.allclose(y, x)


def test_rows_heads_and_strides_do_not_matter():
    x, positions, cos, sin = case()
    y = rope.apply(x, positions, cos, sin)
    assert torch.equal(rope.apply(torch.cat([x, x], dim=1)[:, 3:], positions, cos, sin), y)
    for a, b in ((0, 1), (7, 12), (3, 3)):
        assert torch.equal(rope.apply(x[a:b, 1:2], positions[a:b].int(), cos, sin), y[a:b, 1:2])


def test_positions_are_checked():
    x, positions, cos, sin = case()
    for bad in (100, -1):
        positions[4] = bad
        with pytest.raises(IndexError, match="100 rows"):
            rope.apply(x, positions, cos, sin)

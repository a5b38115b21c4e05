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


def turn_fp64(x, positions, cos, sin) -> torch.Tensor:
    c, s = (t[positions][:, None].double() for t in (cos, sin))
    first, second = x.double().chunk(2, dim=2)
    return torch.cat([first * c - second * s, second * c + first * s], dim=2)


def test_equal_to_the_reference():
    x, positions, cos, sin = case()
    for inverse in (False, True):
        y = rope.apply(x, positions, cos, sin, inverse)
        assert torch.equal(y, rope.apply_reference(x, positions, cos, sin, inverse))
        assert not torch.equal(y, turn_fp64(x, positions, cos, -sin if inverse else sin).float()), "the control: other roundings"


def test_apply_against_fp64_and_inverse():
    x, positions, cos, sin = case()
    y = rope.apply(x, positions, cos, sin)
    torch.testing.assert_close(y.double(), turn_fp64(x, positions, cos, sin), rtol=0, atol=1e-6)
    torch.testing.assert_close(rope.apply(y, positions, cos, sin, inverse=True), x, rtol=0, atol=1e-6)
    back = turn_fp64(x, positions, cos, -sin)
    torch.testing.assert_close(rope.apply(x, positions, cos, sin, inverse=True).double(), back, rtol=0, atol=1e-6)
    assert not torch.allclose(y, x)


def test_rows_heads_and_strides_do_not_matter():
    x, positions, cos, sin = case()
    y = rope.apply(x, positions, cos, sin)
    assert torch.equal(rope.apply(torch.cat([x, x], dim=1)[:, 3:], positions, cos, sin), y)
    for a, b in ((0, 1), (7, 12), (3, 3)):
        assert torch.equal(rope.apply(x[a:b, 1:2], positions[a:b].int(), cos, sin), y[a:b, 1:2])


def test_bf16_is_fp32_of_the_widened_heads_rounded_once():
    x, positions, cos, sin = case()
    x = x.bfloat16()
    for inverse in (False, True):
        y = rope.apply(x, positions, cos, sin, inverse)
        assert y.dtype == torch.bfloat16 and torch.equal(y, rope.apply(x.float(), positions, cos, sin, inverse).bfloat16())
    rounded = (t.bfloat16().float() for t in (cos, sin))
    assert not torch.equal(y, rope.apply(x.float(), positions, *rounded, inverse=True).bfloat16()), "the control: rounded tables show"
    with pytest.raises(ValueError, match="bfloat16"):
        rope.apply(x, positions, cos.bfloat16(), sin)


def test_positions_are_checked():
    x, positions, cos, sin = case()
    for bad in (100, -1):
        positions[4] = bad
        with pytest.raises(IndexError, match="100 rows"):
            rope.apply(x, positions, cos, sin)

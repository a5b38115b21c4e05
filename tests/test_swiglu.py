"""SwiGLU: right within fp32 error, and every element by itself."""

from __future__ import annotations

import pytest
import torch

from kernels import elementwise, swiglu


def case() -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(23, 101, generator=gen) * scale for scale in (6, 2, 1)]


def test_against_fp64():
    gate, up, dy = case()
    gate64, up64 = gate.double().requires_grad_(), up.double().requires_grad_()
    exact = gate64 / (1 + torch.exp(-gate64)) * up64
    (exact * dy).sum().backward()
    for ours, right in zip((swiglu.forward(gate, up), *swiglu.backward(dy, gate, up)), (exact, gate64.grad, up64.grad), strict=True):
        torch.testing.assert_close(ours.double(), right.detach(), rtol=2e-6, atol=2e-6)


def test_equal_to_the_reference():
    gate, up, dy = case()
    y, (dgate, dup) = swiglu.forward(gate, up), swiglu.backward(dy, gate, up)
    assert torch.equal(y, swiglu.forward_reference(gate, up))
    assert all(map(torch.equal, (dgate, dup), swiglu.backward_reference(dy, gate, up)))
    assert not torch.equal(y, gate * torch.sigmoid(gate) * up), "the control: another order of the same operations"


def test_large_gates():
    gate, up = torch.tensor([[-200.0, 200.0, -0.0]]), torch.ones(1, 3)
    assert swiglu.forward(gate, up).tolist() == [[0.0, 200.0, 0.0]]
    dgate, dup = swiglu.backward(up, gate, up)
    assert dgate.tolist() == [[0.0, 1.0, 0.5]] and dup.tolist() == [[0.0, 200.0, 0.0]]


def test_rows_columns_and_strides_do_not_matter():
    gate, up, dy = case()
    y, grads = swiglu.forward(gate, up), swiglu.backward(dy, gate, up)
    fused = torch.cat([gate, up, dy], dim=1)
    views = fused.split(101, dim=1)
    assert torch.equal(swiglu.forward(*views[:2]), y) and torch.equal(swiglu.backward(views[2], *views[:2])[0], grads[0])
    for rows, columns in (
        (slice(0, 1), slice(None)),
        (slice(7, 9), slice(3, 70)),
        (slice(5, 5), slice(None)),
        (slice(None), slice(100, 101)),
    ):
        assert torch.equal(swiglu.forward(gate[rows, columns], up[rows, columns]), y[rows, columns])
        part = swiglu.backward(dy[rows, columns], gate[rows, columns], up[rows, columns])
        assert all(torch.equal(a, b[rows, columns]) for a, b in zip(part, grads, strict=True))


def test_bf16_is_fp32_of_the_widened_values_rounded_once():
    values = [t.bfloat16() for t in case()]
    values[0][0, :4] = torch.tensor([float("inf"), float("nan"), -100.0, 1e-40])
    gate, up, dy = (t.float() for t in values)
    y = swiglu.forward(*values[:2])
    for ours, exact in zip(
        (y, *swiglu.backward(values[2], *values[:2])), (swiglu.forward(gate, up), *swiglu.backward(dy, gate, up)), strict=True
    ):
        right = exact.bfloat16()
        assert ours.dtype == torch.bfloat16 and torch.equal(ours.isnan(), right.isnan())
        assert torch.equal(ours.nan_to_num(0), right.nan_to_num(0))
    assert not torch.equal(y[1:], elementwise.silu(gate).bfloat16()[1:] * values[1][1:]), "the control: a rounding in between shows"


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="swiglu"):
        swiglu.forward(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="one dtype"):
        swiglu.forward(torch.zeros(2, 3), torch.zeros(2, 3).bfloat16())
    with pytest.raises(ValueError, match="stride"):
        swiglu.forward(torch.zeros(3, 2).t(), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="different devices"):
        swiglu.forward(torch.zeros(2, 3), torch.zeros(2, 3, device="meta"))

"""AdamW: equals torch.optim.AdamW within fp32 error, equals its plain reference bit by bit, and any cut of the flat tensor."""

from __future__ import annotations

import pytest
import torch

from kernels import adamw

ARGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
N = 10_007


def start() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    gen = torch.Generator().manual_seed(0)
    p = torch.randn(N, generator=gen)
    grads = [torch.randn(N, generator=gen) * 10 ** (torch.rand(N, generator=gen) * 6 - 5) for _ in range(4)]
    return [p, torch.zeros(N), torch.zeros(N)], grads


def run(state: list[torch.Tensor], grads: list[torch.Tensor], step=adamw.step) -> list[torch.Tensor]:
    p, m, v = (t.clone() for t in state)
    for i, g in enumerate(grads, 1):
        step(p, g.contiguous(), m, v, **ARGS, step=i)
    return [p, m, v]


def test_against_torch():
    state, grads = start()
    p = state[0].double().requires_grad_()
    kwargs = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([p], **kwargs)
    for g in grads:
        p.grad = g.double()
        optimizer.step()
    ours = run(state, grads)
    exact = [p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=1e-7)


def test_equals_the_reference_bit_by_bit():
    state, grads = start()
    assert all(torch.equal(a, b) for a, b in zip(run(state, grads), run(state, grads, adamw.step_reference), strict=True))


@pytest.mark.parametrize("cuts", [[0, 1, 14, 31, 100, 1003, 5000, N], [0, N // 2, N], list(range(0, N, 1111)) + [N]])
def test_any_cut_gives_the_same_bits(cuts):
    state, grads = start()
    whole = run(state, grads)
    parts = [run([t[a:b] for t in state], [g[a:b] for g in grads]) for a, b in zip(cuts, cuts[1:], strict=False)]
    assert all(torch.equal(torch.cat(p), w) for p, w in zip(zip(*parts, strict=True), whole, strict=True))


def test_a_fused_update_would_be_noticed():
    """Control: one multiplication and one addition contracted to an FMA changes bits of the first moment."""
    state, grads = start()
    m = run(state, grads[:2])[1]
    first = run(state, grads[:1])[1]
    b1, c1 = torch.tensor([0.9, 1 - 0.9], dtype=torch.float32)
    fused = (b1.double() * first.double() + (c1 * grads[1]).double()).float()
    assert not torch.equal(fused, m)


def test_bias_correction_and_bad_arguments():
    assert adamw.bias_correction(0.5, 3) == 0.875
    state, grads = start()
    with pytest.raises(ValueError, match="step 0"):
        adamw.step(state[0], grads[0], *state[1:], **ARGS, step=0)
    with pytest.raises(ValueError, match="g must be"):
        adamw.step(state[0], grads[0][:5], *state[1:], **ARGS, step=1)

"""The objective's derivatives against autograd in fp64, and identities between metrics."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.config import Config, Objective
from pipeline.records import Rollout
from stages import objectives

LENGTHS = (3, 7, 1, 5, 2, 6)
SAMPLES = range(len(LENGTHS))

OBJECTIVES = [
    Objective(),
    Objective(kl_type="k1", kl_coef=0.3, entropy_coef=0.01),
    Objective(kl_type="k2", kl_coef=0.3, per_token_loss=True),
    Objective(dual_clip=1.5, clip_high=0.28, entropy_coef=0.02),
    Objective(tis=True, tis_low=0.8, tis_high=1.1),
    Objective(kl_coef=0.0, entropy_coef=0.0),
]


def make(seed: int = 0, spread: float = 0.5) -> tuple[objectives.TokenData, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, current, old, entropy); some rollout logprobs equal the current ones, one token drifted far from the reference."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS)
    n = int(lengths.sum())
    current = -torch.rand(n, generator=g) * 5
    old = current + spread * torch.randn(n, generator=g)
    rollout = torch.where(torch.rand(n, generator=g) < 0.5, current, old + 0.3 * torch.randn(n, generator=g))
    reference = current + 0.5 * torch.randn(n, generator=g)
    reference[4] = current[4] + 5.0  # k3 beyond its limit
    advantages = torch.tensor(objectives.group_advantages([0.0, 1.0, 0.25, 1.0, 0.0, 0.5], 3)).repeat_interleave(lengths)
    tokens = objectives.TokenData(
        rollout,
        reference,
        advantages,
        torch.ones(n),
        lengths.float().repeat_interleave(lengths),
        torch.arange(6).repeat_interleave(lengths),
    )
    return tokens, current, old, torch.rand(n, generator=g) * 3


def loss64(l, h, old, tokens, cfg):
    """The unnormalised loss, written independently in fp64."""
    lo, lr, lf, a = (x.double() for x in (old, tokens.rollout, tokens.reference, tokens.advantages))
    r = torch.exp(l - lo)
    pg = torch.max(-r * a, -r.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * a)
    if cfg.dual_clip:
        pg = torch.where(a < 0, torch.min(pg, -cfg.dual_clip * a), pg)
    if cfg.tis:
        pg = pg * torch.exp(lo - lr).clamp(cfg.tis_low, cfg.tis_high)
    kl = {"k1": l - lf, "k2": (l - lf) ** 2 / 2, "k3": (torch.exp(lf - l) - 1 - (lf - l)).clamp(-10, 10)}[cfg.kl_type]
    loss = pg - cfg.entropy_coef * h + cfg.kl_coef * kl
    return (loss if cfg.per_token_loss else loss / tokens.counts.double()).sum()


@pytest.mark.parametrize("cfg", OBJECTIVES, ids=range(len(OBJECTIVES)))
def test_coefficients_are_the_gradient_of_the_loss(cfg):
    tokens, current, old, entropy = make()
    l, h = current.double().requires_grad_(), entropy.double().requires_grad_()
    loss64(l, h, old, tokens, cfg).backward()
    g_logprob, g_entropy = objectives.coefficients(current, old, tokens, cfg)
    assert g_logprob.dtype == torch.float32
    torch.testing.assert_close(g_logprob.double(), l.grad, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(g_entropy.double(), torch.zeros_like(entropy, dtype=torch.float64) if h.grad is None else h.grad)


def test_a_wrong_derivative_is_found():
    tokens, current, old, entropy = make()
    l = current.double().requires_grad_()
    loss64(l, entropy.double(), old, tokens, Objective(clip_low=0.1)).backward()
    g_logprob, _ = objectives.coefficients(current, old, tokens, Objective(clip_low=0.3))
    assert not torch.allclose(g_logprob.double(), l.grad, rtol=2e-5, atol=2e-6)


def test_a_token_alone_has_the_same_coefficients():
    tokens, current, old, _ = make()
    whole = objectives.coefficients(current, old, tokens, OBJECTIVES[3])
    for i in range(tokens.size):
        at = torch.tensor([i])
        part = objectives.coefficients(current[at], old[at], tokens.at(at), OBJECTIVES[3])
        assert all(torch.equal(a[at], b) for a, b in zip(whole, part, strict=True))
    nothing = torch.empty(0, dtype=torch.int64)
    assert objectives.coefficients(current[nothing], old[nothing], tokens.at(nothing), OBJECTIVES[3])[0].shape == (0,)


def test_an_inactive_token_counts_nowhere():
    tokens, current, old, entropy = make()
    mask = tokens.mask.clone()
    mask[5] = 0.0
    counts = tokens.counts - (tokens.samples == tokens.samples[5]).float()
    masked = replace(tokens, mask=mask, counts=counts)
    poisoned = current.clone()
    poisoned[5] = float("inf")
    assert objectives.coefficients(poisoned, old, masked, Objective())[0][5] == 0.0
    kept = mask.bool()
    expected = objectives.metrics(current[kept], entropy[kept], old[kept], masked.at(kept), SAMPLES, Objective())
    assert objectives.metrics(poisoned, entropy, old, masked, SAMPLES, Objective()) == expected


def test_advantages():
    a = objectives.group_advantages([1.0, 0.0, 0.0, 1.0], 4)
    assert a == pytest.approx([1.0, -1.0, -1.0, 1.0], rel=1e-5)
    assert objectives.group_advantages([0.1] * 3 + [0.0, 0.0, 3.0], 3)[:3] == [0.0, 0.0, 0.0]
    assert objectives.group_advantages([1.0, 0.0], 2, normalize_std=False) == [0.5, -0.5]
    with pytest.raises(ValueError, match="groups of 4"):
        objectives.group_advantages([1.0] * 6, 4)


@pytest.mark.parametrize("cfg", OBJECTIVES, ids=range(len(OBJECTIVES)))
def test_metrics_agree_with_fp64_and_with_each_other(cfg):
    tokens, current, old, entropy = make()
    m = objectives.metrics(current, entropy, old, tokens, SAMPLES, cfg)
    divisor = objectives.slots_and_divisor(tokens, SAMPLES, cfg)[1]
    assert divisor == (sum(LENGTHS) if cfg.per_token_loss else 6)
    assert m["train/loss"] == pytest.approx(
        float(loss64(current.double(), entropy.double(), old, tokens, cfg)) / divisor, rel=1e-5, abs=1e-6
    )
    f = np.float32
    parts = (m["train/pg_loss"], float(f(cfg.entropy_coef)), m["train/entropy_loss"], float(f(cfg.kl_coef)), m["train/kl_loss"])
    assert m["train/loss"] == float(f(parts[0] - parts[1] * parts[2] + parts[3] * parts[4]))
    assert all(value == float(f(value)) for value in m.values())
    differing = sum(a != b for a, b in zip(current.tolist(), tokens.rollout.tolist(), strict=True))
    assert m["train/train_current_rollout_logprob_mismatch_count"] == differing > 0
    assert m["train/train_current_rollout_logprob_numel"] == sum(LENGTHS)
    assert m["train/tis_abs"] > 0 and m["train/mismatch_k3_kl"] > 0


def test_metrics_of_equal_policies():
    tokens, current, _, entropy = make()
    same = replace(tokens, rollout=current, reference=current)
    m = objectives.metrics(current, entropy, current, same, SAMPLES, Objective())
    zero = ("kl_loss", "ppo_kl", "tis_abs", "mismatch_kl", "mismatch_k3_kl", "train_current_rollout_logprob_mismatch_count", "pg_clipfrac")
    assert all(m[f"train/{key}"] == 0.0 for key in zero) and m["train/ois"] == m["train/tis"] == 1.0
    assert m["train/pg_loss"] == float(np.float32(-sum(a for a in objectives.group_advantages([0.0, 1.0, 0.25, 1.0, 0.0, 0.5], 3)) / 6))


def test_an_update_over_some_samples_sees_no_others():
    tokens, current, old, entropy = make()
    part = objectives.metrics(current, entropy, old, tokens, range(2, 5), Objective())
    slots, divisor = objectives.slots_and_divisor(tokens, range(2, 5), Objective())
    assert divisor == 3 and len(slots) == sum(LENGTHS[2:5])
    current[0] += 1.0
    entropy[-1] += 1.0
    assert objectives.metrics(current, entropy, old, tokens, range(2, 5), Objective()) == part
    assert objectives.metrics(current, entropy, old, tokens, SAMPLES, Objective())["train/global_batch_size"] == 6.0


def test_token_data_of_a_rollout():
    lengths, prompts = np.array([5, 4, 6, 3], np.int32), np.array([2, 2, 3, 3], np.int32)
    n = int((lengths - prompts).sum())
    zeros = np.zeros(4, np.int32)
    rewards = np.array([1, 0, 0.5, 0.5], np.float32)
    rollout = Rollout(np.zeros(18, np.int32), lengths, prompts, zeros, zeros, np.arange(n, dtype=np.float32), rewards, zeros)
    cfg = Config(name="x")
    cfg.sampling.samples_per_prompt = 2
    tokens = objectives.TokenData.of(rollout, np.zeros(n, np.float32), cfg)
    assert tokens.samples.tolist() == [0] * 3 + [1] * 2 + [2] * 3  # the last sample has no response
    assert tokens.advantages.tolist()[5:] == [0.0] * 3 and tokens.advantages[0] == -tokens.advantages[3]
    assert tokens.counts.tolist() == [3.0] * 3 + [2.0] * 2 + [3.0] * 3
    m = objectives.metrics(tokens.rollout, tokens.rollout, tokens.rollout, tokens, range(4), cfg.objective)
    assert m["train/entropy_loss"] == float(np.float32(math.fsum([1.0, 3.5, 6.0]) / 4))

"""GRPO as pure functions: advantages, the loss's derivatives by logprob and entropy, and every train/* metric.

Per active response token: l current logprob in training, lo old logprob (trainer, before the update), lr rollout logprob, lf reference
logprob, H entropy, A advantage. With r = exp(l - lo), the loss of a token is

    pg  = w * max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)                 PPO clip (Schulman et al. 2017)
          and with dual_clip c, where A < 0: min(that, -c A)                     dual clip (Ye et al. 2020)
    w   = clamp(exp(lo - lr), tis_low, tis_high) if tis else 1                   truncated importance sampling
    kl  = k1: l - lf | k2: (l - lf)^2 / 2 | k3: exp(lf - l) - 1 - (lf - l), clamped to [-10, 10]
    loss = pg - entropy_coef * H + kl_coef * kl

The loss of an update is M(loss), M(x) = (1/B) sum over samples [sum over active tokens x / max(n_s, 1)], or the mean over active tokens
with `per_token_loss`. Elementwise fp32 in single IEEE operations with our own exp; sums are exact (`math.fsum`), so no order decides a bit.
Shape legend: A tokens of the packed response arrays of an iteration, T any selection of them, S samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kernels import elementwise

if TYPE_CHECKING:
    from pipeline.config import Config, Objective
    from pipeline.records import Rollout

ADVANTAGE_EPS = 1e-6  # added to the group's standard deviation
K3_LIMIT = 10.0


def group_advantages(rewards: Sequence[float], group_size: int, normalize_std: bool = True) -> list[float]:
    """Advantage of each sample in its group of `group_size` neighbours: (reward - mean) / (population std + 1e-6), fp64 rounded to fp32.

    Mean and variance are exact sums, each rounded once. A group of equal rewards gets exact zeros.
    """
    if len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards do not fill groups of {group_size}")
    advantages: list[float] = []
    for i in range(0, len(rewards), group_size):
        group = [float(r) for r in rewards[i : i + group_size]]
        if min(group) == max(group):  # their mean may round to a neighbour
            advantages += [0.0] * group_size
            continue
        mean = math.fsum(group) / group_size
        centred = [r - mean for r in group]
        std = math.sqrt(math.fsum(d * d for d in centred) / group_size)
        advantages += [_fp32(d / (std + ADVANTAGE_EPS) if normalize_std else d) for d in centred]
    return advantages


@dataclass(frozen=True)
class TokenData:
    """What is known of response tokens before training: one value per token, in canonical sample order."""

    rollout: Tensor  # fp32 [T] logprob by the rollout engine
    reference: Tensor  # fp32 [T] logprob by the frozen model
    advantages: Tensor  # fp32 [T]
    mask: Tensor  # fp32 [T] 1 = active
    counts: Tensor  # fp32 [T] active tokens of the token's sample
    samples: Tensor  # int64 [T] canonical index of the token's sample

    @classmethod
    def of(cls, rollout: Rollout, reference: np.ndarray, cfg: Config) -> TokenData:
        """All response tokens of an iteration. reference: fp32 [A]."""
        lengths = torch.from_numpy(rollout.response_lengths.astype(np.int64))
        advantages = group_advantages(rollout.rewards.tolist(), cfg.sampling.samples_per_prompt, cfg.objective.normalize_std)
        logprobs = torch.from_numpy(rollout.logprobs)
        return cls(
            rollout=logprobs,
            reference=torch.from_numpy(reference),
            advantages=torch.tensor(advantages, dtype=torch.float32).repeat_interleave(lengths),
            mask=torch.ones_like(logprobs),
            counts=lengths.to(torch.float32).repeat_interleave(lengths),
            samples=torch.arange(len(lengths)).repeat_interleave(lengths),
        )

    @property
    def size(self) -> int:
        return len(self.samples)

    def at(self, slots: Tensor) -> TokenData:
        """The tokens at these indices (int64, or a mask)."""
        return TokenData(**{f.name: getattr(self, f.name)[slots] for f in fields(self)})


def slots_and_divisor(tokens: TokenData, samples: range, cfg: Objective) -> tuple[Tensor, int]:
    """Indices of the tokens of an update's samples, and what its unnormalised gradient is divided by: samples, or active tokens."""
    slots = ((tokens.samples >= samples.start) & (tokens.samples < samples.stop)).nonzero()[:, 0]
    return slots, max(1, int(tokens.mask[slots].sum())) if cfg.per_token_loss else len(samples)


# --- per token ---------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PolicyTerms:
    """Per-token terms of the policy loss, fp32 [T]."""

    ratio: Tensor
    unclipped: Tensor
    clipped: Tensor
    loss: Tensor  # with dual clip and truncated importance sampling
    slope: Tensor  # d loss / d l


def policy_terms(l: Tensor, lo: Tensor, lr: Tensor, advantages: Tensor, cfg: Objective) -> PolicyTerms:
    """Clipped policy loss of each token and its derivative. All fp32 [T]."""
    ratio = elementwise.exp(l - lo)
    unclipped = -ratio * advantages
    clipped = -torch.clamp(ratio, 1.0 - cfg.clip_low, 1.0 + cfg.clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    slope = torch.where(unclipped >= clipped, unclipped, 0.0)  # d(-r A)/dl = -r A; a clipped ratio is constant
    if cfg.dual_clip is not None:
        bound = -cfg.dual_clip * advantages
        capped = (advantages < 0) & (loss > bound)
        loss, slope = torch.where(capped, bound, loss), torch.where(capped, 0.0, slope)
    if cfg.tis:
        weight = torch.clamp(elementwise.exp(lo - lr), cfg.tis_low, cfg.tis_high)
        loss, slope = weight * loss, weight * slope
    return PolicyTerms(ratio, unclipped, clipped, loss, slope)


def kl_terms(l: Tensor, lf: Tensor, kl_type: str) -> tuple[Tensor, Tensor]:
    """Estimate of KL(current || reference) of each token, and its derivative by l. fp32 [T]."""
    x = l - lf
    match kl_type:
        case "k1":
            return x, torch.ones_like(x)
        case "k2":
            return x * x * 0.5, x
        case "k3":
            e = elementwise.exp(-x)
            k = e - 1.0 + x
            inside = (k >= -K3_LIMIT) & (k <= K3_LIMIT)
            return torch.clamp(k, -K3_LIMIT, K3_LIMIT), torch.where(inside, 1.0 - e, 0.0)
        case _:
            raise ValueError(f"objective.kl_type={kl_type!r}: choose k1, k2 or k3")


def coefficients(l: Tensor, old: Tensor, tokens: TokenData, cfg: Objective) -> tuple[Tensor, Tensor]:
    """(g_logprob, g_entropy), fp32 [T]: derivatives of the UNNORMALISED loss, the sum over samples of the inner sums of M.

    The caller divides the summed gradient by `slots_and_divisor`'s divisor. A token's coefficients depend on nothing but that token.
    """
    slope = policy_terms(l, old, tokens.rollout, tokens.advantages, cfg).slope
    if cfg.kl_coef:
        slope = slope + cfg.kl_coef * kl_terms(l, tokens.reference, cfg.kl_type)[1]
    weight = tokens.mask if cfg.per_token_loss else tokens.mask / torch.clamp(tokens.counts, min=1.0)
    active = tokens.mask != 0  # an inactive token may hold anything, even infinities
    return torch.where(active, slope * weight, 0.0), torch.where(active, -cfg.entropy_coef * weight, 0.0)


# --- metrics -----------------------------------------------------------------------------------------------------------------
def metrics(current: Tensor, entropy: Tensor, old: Tensor, tokens: TokenData, samples: range, cfg: Objective) -> dict[str, float]:
    """Every train/* metric that is computed from tokens, for an update over `samples`; each rounded to fp32 once.

    current, entropy, old: fp32 [A], the whole iteration in canonical order. `train/loss` is
    fp32(pg_loss - fp32(entropy_coef) * entropy_loss + fp32(kl_coef) * kl_loss), of the rounded values, so a reader can recompute it.
    """
    slots, _ = slots_and_divisor(tokens, samples, cfg)
    slots = slots[tokens.mask[slots] != 0]
    t, l, lo, h = tokens.at(slots), current[slots], old[slots], entropy[slots]
    mean = _reducer(t.samples.tolist(), samples, cfg.per_token_loss)
    policy = policy_terms(l, lo, t.rollout, t.advantages, cfg)
    w = elementwise.exp(lo - t.rollout)
    x = lo - t.rollout
    differ = l.contiguous().view(torch.int32) != t.rollout.contiguous().view(torch.int32)
    values = {
        "pg_loss": mean(policy.loss),
        "pg_clipfrac": mean(policy.clipped > policy.unclipped),
        "entropy_loss": mean(h),
        "kl_loss": mean(kl_terms(l, t.reference, cfg.kl_type)[0]),
        "ppo_kl": mean(lo - l),
        "ois": mean(policy.ratio),
        "tis": mean(w),
        "tis_abs": mean((w - 1.0).abs()),
        "tis_clipfrac": mean(torch.clamp(w, cfg.tis_low, cfg.tis_high) != w),
        "train_rollout_logprob_abs_diff": mean((lo - t.rollout).abs()),
        "train_current_rollout_logprob_mismatch_count": float(differ.sum()),
        "train_current_rollout_logprob_max_abs_diff": float((l - t.rollout).abs().max()) if len(l) else 0.0,
        "train_current_rollout_logprob_numel": float(len(l)),
        "mismatch_kl": _mean(t.rollout - lo),
        "mismatch_k3_kl": _mean(elementwise.exp(x) - x - 1.0),
        "global_batch_size": float(len(samples)),
    }
    values = {key: _fp32(value) for key, value in values.items()}
    loss = values["pg_loss"] - _fp32(cfg.entropy_coef) * values["entropy_loss"] + _fp32(cfg.kl_coef) * values["kl_loss"]
    return {"train/loss": _fp32(loss), **{f"train/{key}": value for key, value in values.items()}}


def _reducer(sample_of: list[int], samples: range, per_token: bool) -> Callable[[Tensor], float]:
    """M: fp64 from exact sums, over active tokens in canonical sample order. `sample_of`: each token's sample."""
    if per_token:
        return _mean
    bounds = np.searchsorted(np.array(sample_of, dtype=np.int64), np.arange(samples.start, samples.stop + 1))

    def mean(x: Tensor) -> float:
        values = x.double().tolist()
        inner = [math.fsum(values[a:b]) / max(b - a, 1) for a, b in pairwise(bounds)]
        return math.fsum(inner) / max(len(samples), 1)

    return mean


def _mean(x: Tensor) -> float:
    return math.fsum(x.double().tolist()) / max(len(x), 1)


def _fp32(x: float) -> float:
    return float(np.float32(x))

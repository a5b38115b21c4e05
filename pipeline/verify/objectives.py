"""The metrics of an optimizer step, computed again from the stored per-token arrays, bit for bit.

Per token, l = current, lo = old, lr = rollout, lf = reference logprob, A = advantage, H = entropy: single fp32 operations, as the trainer
makes them. Sums over tokens are exact (math.fsum), rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .float32 import exp, fp32

ADVANTAGE_EPS = 1e-6
K3_LIMIT = 10.0


@dataclass
class Tokens:
    """Response tokens of an update, in sample order."""

    current: Sequence[float]
    old: Sequence[float]
    rollout: Sequence[float]
    reference: Sequence[float]
    advantages: Sequence[float]
    entropy: Sequence[float]
    lengths: Sequence[int]  # of each sample


def advantages(rewards: Sequence[float], group_size: int, normalize_std: bool) -> list[float]:
    """(reward - mean) / (population std + 1e-6) within each group of neighbours; zeros where all rewards are equal."""
    found: list[float] = []
    for i in range(0, len(rewards), group_size):
        group = rewards[i : i + group_size]
        if min(group) == max(group):
            found += [0.0] * len(group)
            continue
        mean = math.fsum(group) / len(group)
        centred = [r - mean for r in group]
        std = math.sqrt(math.fsum(d * d for d in centred) / len(group))
        found += [fp32(d / (std + ADVANTAGE_EPS) if normalize_std else d) for d in centred]
    return found


def rollout_metrics(rewards: Sequence[float], lengths: Sequence[int], finish: Sequence[int], group_size: int) -> dict[str, float]:
    n = len(rewards)
    groups = [set(rewards[i : i + group_size]) for i in range(0, n, group_size)]
    mean = math.fsum(rewards) / n
    deviations = [r - mean for r in rewards]
    return {
        "rollout/reward_mean": mean,
        "rollout/reward_std": math.sqrt(math.fsum(d * d for d in deviations) / n),
        "rollout/frac_zero_std": sum(len(group) == 1 for group in groups) / len(groups),
        "rollout/response_length_mean": sum(lengths) / n,
        "rollout/truncated_frac": sum(code == 1 for code in finish) / n,
    }


def counted(t: Tokens) -> dict[str, float]:
    """The metrics that no setting decides."""
    differ = [a != b or math.copysign(1, a) != math.copysign(1, b) for a, b in zip(t.current, t.rollout)]
    x = [fp32(lo - lr) for lo, lr in zip(t.old, t.rollout)]
    return _rounded(
        {
            "train_current_rollout_logprob_mismatch_count": sum(differ),
            "train_current_rollout_logprob_max_abs_diff": max((abs(fp32(a - b)) for a, b in zip(t.current, t.rollout)), default=0.0),
            "train_current_rollout_logprob_numel": len(t.current),
            "global_batch_size": len(t.lengths),
            "mismatch_kl": _mean([fp32(lr - lo) for lo, lr in zip(t.old, t.rollout)]),
            "mismatch_k3_kl": _mean([fp32(fp32(exp(d) - d) - 1.0) for d in x]),
        }
    )


def metrics(t: Tokens, objective: dict[str, Any]) -> dict[str, float]:
    """The metrics that depend on the objective's settings, the loss included."""
    mean = _mean if objective["per_token_loss"] else lambda values: _mean_of_samples(values, t.lengths)
    ratio = [exp(fp32(l - lo)) for l, lo in zip(t.current, t.old)]
    weight = [exp(fp32(lo - lr)) for lo, lr in zip(t.old, t.rollout)]
    tis_low, tis_high = fp32(objective["tis_low"]), fp32(objective["tis_high"])
    bounded = [min(max(w, tis_low), tis_high) for w in weight]
    low, high = fp32(1.0 - objective["clip_low"]), fp32(1.0 + objective["clip_high"])
    unclipped = [fp32(-r * a) for r, a in zip(ratio, t.advantages)]
    clipped = [fp32(-min(max(r, low), high) * a) for r, a in zip(ratio, t.advantages)]
    loss = [max(a, b) for a, b in zip(unclipped, clipped)]
    if objective["dual_clip"] is not None:
        bounds = [fp32(fp32(-objective["dual_clip"]) * a) for a in t.advantages]
        loss = [bound if a < 0 and own > bound else own for own, bound, a in zip(loss, bounds, t.advantages)]
    if objective["tis"]:
        loss = [fp32(w * own) for w, own in zip(bounded, loss)]
    kl = [_kl(fp32(l - lf), objective["kl_type"]) for l, lf in zip(t.current, t.reference)]
    values = _rounded(
        {
            "pg_loss": mean(loss),
            "pg_clipfrac": mean([float(b > a) for a, b in zip(unclipped, clipped)]),
            "entropy_loss": mean(t.entropy),
            "kl_loss": mean(kl),
            "ppo_kl": mean([fp32(lo - l) for l, lo in zip(t.current, t.old)]),
            "ois": mean(ratio),
            "tis": mean(weight),
            "tis_abs": mean([abs(fp32(w - 1.0)) for w in weight]),
            "tis_clipfrac": mean([float(a != b) for a, b in zip(bounded, weight)]),
            "train_rollout_logprob_abs_diff": mean([abs(fp32(lo - lr)) for lo, lr in zip(t.old, t.rollout)]),
        }
    )
    entropy_coef, kl_coef = fp32(objective["entropy_coef"]), fp32(objective["kl_coef"])
    values["train/loss"] = fp32(values["train/pg_loss"] - entropy_coef * values["train/entropy_loss"] + kl_coef * values["train/kl_loss"])
    return values


def _kl(x: float, kind: str) -> float:
    """x = l - lf."""
    match kind:
        case "k1":
            return x
        case "k2":
            return fp32(fp32(x * x) * 0.5)
        case "k3":
            return min(max(fp32(fp32(exp(-x) - 1.0) + x), -K3_LIMIT), K3_LIMIT)
    raise ValueError(f"objective.kl_type={kind}: is not known")


def learning_rate(optimizer: dict[str, Any], step: int, total: int) -> float:
    warmup = optimizer["warmup_steps"]
    if step < warmup:
        return optimizer["lr"] * ((step + 1) / warmup)
    done = (step - warmup) / max(1, total - warmup)
    match optimizer["schedule"]:
        case "constant":
            return optimizer["lr"]
        case "linear":
            return optimizer["lr"] * max(0.0, 1.0 - done)
        case "cosine":
            return optimizer["lr"] * 0.5 * (1.0 + _cos_pi(min(1.0, done)))
    raise ValueError(f"optimizer.schedule={optimizer['schedule']}: is not known")


def _cos_pi(x: float) -> float:
    """cos(pi x) by the Taylor series of the sine, as a library's may round differently on another machine."""
    y = math.pi * (0.5 - x)
    term = total = y
    for k in range(1, 13):
        term = -term * y * y / ((2 * k) * (2 * k + 1))
        total += term
    return total


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {f"train/{name}": fp32(float(value)) for name, value in values.items()}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / max(len(values), 1)


def _mean_of_samples(values: Sequence[float], lengths: Sequence[int]) -> float:
    """Of each sample's mean."""
    inner, start = [], 0
    for length in lengths:
        inner.append(math.fsum(values[start : start + length]) / max(length, 1))
        start += length
    return math.fsum(inner) / max(len(lengths), 1)

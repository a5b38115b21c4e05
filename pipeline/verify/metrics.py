"""Metrics of each step: all there, finite, numbers that their definition can give, and the identities between them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .checks import Checks, alike
from .float32 import fp32
from .form import is_ours

MISMATCH = "train/train_current_rollout_logprob_mismatch_count"
MAX_ABS_DIFF = "train/train_current_rollout_logprob_max_abs_diff"
NUMEL = "train/train_current_rollout_logprob_numel"
ABS_DIFF = "train/train_rollout_logprob_abs_diff"
BATCH = "train/global_batch_size"
COUNTERS = ("train/step", BATCH)  # integers in the published report, floats in ours
FRACTIONS = ("train/pg_clipfrac", "train/tis_clipfrac", "rollout/frac_zero_std", "rollout/truncated_frac", "rollout/reward_mean")
NOT_NEGATIVE = (
    "train/ois", "train/tis", "train/tis_abs", "train/grad_norm", "rollout/reward_std", "rollout/response_length_mean",
    MISMATCH, MAX_ABS_DIFF, NUMEL, ABS_DIFF, BATCH, *FRACTIONS,
)  # fmt: skip
TWO_DIGITS = [float(f"{digits}e{exponent}") for exponent in range(-6, 0) for digits in range(1, 100)]
PROPOSERS = 8  # steps whose losses are asked for coefficients
REQUIRED = ("train/loss", "train/grad_norm", "train/step", "train/pg_loss", "train/kl_loss", "train/entropy_loss", NUMEL, MISMATCH, BATCH)


def iterations(run: dict[str, Any]) -> list[list[str]]:
    """The optimizer steps of each iteration, in order. The published report has one a step."""
    if "chain" not in run:
        return [[step] for step in sorted(run["steps"], key=_number)]
    return [sorted(element["steps"], key=_number) for element in run["chain"][1:]]


def check_steps(report: dict[str, Any], checks: Checks) -> None:
    """Every run has the same steps and metrics, and every value is a finite number."""
    runs = report["runs"]
    names = [run["run_id"] for run in runs]
    checks.that(len(set(names)) == len(names), "runs", "two runs have the same run_id")
    first = iterations(runs[0])
    steps = [str(i) for i in range(sum(map(len, first)))]
    checks.that(steps, "runs", "no steps")
    heads = [own[0] for own in first if own]
    for run in runs:
        place = run["run_id"]
        checks.equal(f"{place}: steps of each iteration", iterations(run), first)
        checks.equal(f"{place}: steps", sorted(run["steps"], key=_number), steps)
        checks.equal(f"{place}: tokens", sorted(run["tokens"], key=_number), heads)
        checks.equal(f"{place}: performance", sorted(run["performance"], key=_number), heads)
        for step, values in run["steps"].items():
            side = "train/" if step not in heads else ""
            wanted = sorted(name for name in runs[0]["steps"][steps[0]] if name.startswith(side))
            checks.equal(f"{place}: metrics of step {step}", sorted(values), wanted)
            checks.that(set(REQUIRED) <= set(values), f"{place}: metrics of step {step}", f"lack one of {', '.join(REQUIRED)}")
            for name, value in values.items():
                _check_value(f"{place}: {name} of step {step}", name, value, is_ours(report), checks)


def _number(step: str) -> tuple[int, str]:
    return (int(step) if step.isdecimal() else -1, step)


def _check_value(place: str, name: str, value: Any, ours: bool, checks: Checks) -> None:
    kind = int if name in COUNTERS and not ours else float
    if not checks.that(isinstance(value, kind), place, f"{value} is no finite number of type {kind.__name__}"):
        return
    fp64 = name.startswith("train/lr-") or name == "train/grad_norm" and not ours
    if name.startswith("train/") and not fp64:
        checks.that(fp32(value) == value, place, f"{value} is no fp32 number")
    if name in NOT_NEGATIVE:
        checks.that(math.copysign(1, value) > 0, place, f"{value} is negative")
    if name in FRACTIONS:
        checks.that(value <= 1, place, f"{value} is above 1")


def check_identities(report: dict[str, Any], checks: Checks) -> None:
    """What follows from other metrics of the step, and of the tokens beside them."""
    coefficients = _coefficients(report, checks)
    for run in report["runs"]:
        counters = [(index, values) for index, values in enumerate(run["steps"][step] for own in iterations(run) for step in own)]
        for index, values in counters:
            place = f"{run['run_id']}: step {index}"
            checks.that(values["train/step"] == index, f"{place}: train/step", f"is {values['train/step']}")
            if coefficients:
                loss = _loss(values, *coefficients)
                checks.equal(f"{place}: train/loss", values["train/loss"], loss)
            rates = [value for name, value in values.items() if name.startswith("train/lr-")]
            checks.that(not rates or alike(rates), f"{place}: train/lr-pg_*", "differ, but all groups follow one schedule")
            _check_agreement(values, place, checks)
        for own in iterations(run):
            _check_iteration(run, own, checks)


def _loss(m: dict[str, float], entropy_coef: float, kl_coef: float) -> float:
    return fp32(m["train/pg_loss"] - fp32(entropy_coef) * m["train/entropy_loss"] + fp32(kl_coef) * m["train/kl_loss"])


def _coefficients(report: dict[str, Any], checks: Checks) -> tuple[float, float] | None:
    """(entropy, KL) coefficients, which no report holds: the pair of two digits each that explains most steps; None without one."""
    steps = [values for run in report["runs"] for values in run["steps"].values()]
    tried: dict[tuple[float, float], int] = {}
    for m in [{}, *steps[:PROPOSERS]]:
        for pair in _pairs_of(m) if m else [(0.0, 0.0)]:
            if pair not in tried and (not m or _loss(m, *pair) == m["train/loss"]):
                tried[pair] = sum(_loss(other, *pair) == other["train/loss"] for other in steps)
                if tried[pair] == len(steps):
                    return pair
    best = max(tried, key=lambda pair: tried[pair])
    if 2 * tried[best] > len(steps):
        return best
    checks.note("train/loss from its parts: the report holds no coefficients, and no pair of two digits each explains the losses")
    return None


def _pairs_of(m: dict[str, float]) -> Iterator[tuple[float, float]]:
    """Coefficients that may have made one step's loss."""
    rest = m["train/loss"] - m["train/pg_loss"]
    for entropy_coef in (0.0, *TWO_DIGITS):
        if m["train/kl_loss"]:
            yield entropy_coef, float(f"{(rest + entropy_coef * m['train/entropy_loss']) / m['train/kl_loss']:.2g}")
        else:
            yield entropy_coef, 0.0


def _check_agreement(m: dict[str, float], place: str, checks: Checks) -> None:
    """Current, old and rollout logprobs: what their distances say of the other metrics."""
    checks.that(m[MISMATCH] <= m[NUMEL], f"{place}: {MISMATCH}", "is above the number of tokens")
    checks.that(m[NUMEL] > 0, f"{place}: {NUMEL}", "no token was trained on")
    checks.that(m[MISMATCH] > 0 or m[MAX_ABS_DIFF] == 0, f"{place}: {MISMATCH}", "is 0 although logprobs differ")
    follows = {}
    if m[ABS_DIFF] == 0:  # old = rollout
        follows |= {"tis": 1.0, "tis_abs": 0.0, "mismatch_kl": 0.0, "mismatch_k3_kl": 0.0}
    if m[MAX_ABS_DIFF] == 0 and m[ABS_DIFF] == 0:  # current = rollout = old
        follows |= {"ois": 1.0, "ppo_kl": 0.0, "pg_clipfrac": 0.0}
    for name, value in follows.items():
        if (key := f"train/{name}") in m:
            checks.equal(f"{place}: {key}, where logprobs are equal", m[key], value)
    if m[MAX_ABS_DIFF] == 0 and "train/ppo_kl" in m:  # its mean is of old - rollout
        checks.that(abs(m["train/ppo_kl"]) <= m[ABS_DIFF], f"{place}: train/ppo_kl", f"is larger than {ABS_DIFF}")


def _check_iteration(run: dict[str, Any], steps: list[str], checks: Checks) -> None:
    """Samples and tokens of an iteration against what its steps trained on."""
    place, row, first = f"{run['run_id']}: iteration of step {steps[0]}", run["tokens"][steps[0]], run["steps"][steps[0]]
    samples = row["sample_count"]
    checks.that(sum(run["steps"][step][BATCH] for step in steps) == samples, f"{place}: sample_count", "is not that of its steps")
    per_sample = 1 if "chain" in run else samples  # the published counts are means over samples
    active = sum(run["steps"][step][NUMEL] for step in steps) * per_sample
    checks.that(
        row["token_count"] >= active + samples, f"{place}: token_count", "is less than one prompt token a sample and the response tokens"
    )
    if "rollout/response_length_mean" in first:
        checks.equal(f"{place}: rollout/response_length_mean", first["rollout/response_length_mean"], active / samples)
    for name in ("rollout/truncated_frac", "rollout/frac_zero_std"):
        if name in first:
            checks.that(_is_share(first[name], samples), f"{place}: {name}", f"is no share of {samples} samples or their groups")
    if {"rollout/reward_std", "rollout/frac_zero_std"} <= set(first) and first["rollout/reward_std"] == 0:
        checks.equal(f"{place}: rollout/frac_zero_std, although all rewards are equal", first["rollout/frac_zero_std"], 1.0)


def _is_share(value: float, samples: int) -> bool:
    """k / samples, rounded once; of groups that fill the samples too, as k / n is the same quotient."""
    return round(value * samples) / samples == value

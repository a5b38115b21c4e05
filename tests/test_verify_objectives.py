"""Metrics by the verifier's own fp32 arithmetic, in plain Python, against those of the trainer: the same bits under every setting."""

from __future__ import annotations

import itertools
import struct
from dataclasses import asdict

import numpy as np
import pytest
import torch

from kernels import elementwise
from pipeline.config import Objective, Optimizer
from pipeline.verify import float32, objectives
from stages import objectives as trainer
from stages.optimizer import learning_rate

LENGTHS = [7, 1, 12, 4]


def test_exp_has_the_bits_of_the_kernel():
    random = np.random.default_rng(0)
    parts = [random.uniform(-110, 95, 4000), random.uniform(-1, 1, 4000), random.normal(0, 1e-6, 1000)]
    edges = [0.0, -0.0, 89.0, 88.8, -104.0, -103.9, -95.5, -88.0, -87.4]
    x = np.concatenate([*parts, edges]).astype(np.float32)
    expected = elementwise.exp(torch.from_numpy(x)).tolist()
    assert [float32.exp(value).hex() for value in x.tolist()] == [value.hex() for value in expected]


def test_fp32_rounds_and_overflows_as_ieee_does():
    random = np.random.default_rng(1)
    values = [*(random.standard_normal(2000) * 10.0 ** random.integers(-45, 39, 2000)).tolist(), 3.4028235677973366e38, 1e39, -1e300, 1e-46]
    with np.errstate(over="ignore"):
        expected = [float(np.float32(value)) for value in values]
    assert [float32.fp32(value).hex() for value in values] == [value.hex() for value in expected]


def test_fma_rounds_once():
    """In the middle of two fp32 numbers but for a bit far below: rounding the fp64 sum as it is would go the other way."""
    a, b = 1 + 2.0**-12, 1 + 2.0**-12  # a * b = 1 + 2^-11 + 2^-24: the middle between two fp32 numbers
    for c in (2.0**-60, -(2.0**-60), 0.0):
        expected = np.float32(1 + 2.0**-11 + (2.0**-23 if c > 0 else 0))
        assert float32.fma(a, b, c) == float(expected)


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_metrics_have_the_trainers_bits(kl_type):
    random = np.random.default_rng(2)
    for per_token, tis, dual_clip, eps in itertools.product((False, True), (False, True), (None, 1.5), (0.0, 1e-3, 0.5, 4.0)):
        cfg = Objective(kl_type=kl_type, per_token_loss=per_token, tis=tis, dual_clip=dual_clip, entropy_coef=0.003, kl_coef=0.02)
        count = sum(LENGTHS)
        rollout, entropy = (-3 * random.random(count)).astype(np.float32), random.random(count).astype(np.float32)
        old = (rollout + random.normal(0, eps, count) * (random.random(count) < 0.7)).astype(np.float32)
        current = (old + random.normal(0, eps, count)).astype(np.float32)
        reference, advantages = (random.normal(-1, 1, n).astype(np.float32) for n in (count, len(LENGTHS)))
        lengths = torch.tensor(LENGTHS)
        data = trainer.TokenData(
            torch.from_numpy(rollout),
            torch.from_numpy(reference),
            torch.from_numpy(advantages).repeat_interleave(lengths),
            torch.ones(count),
            lengths.float().repeat_interleave(lengths),
            torch.arange(len(LENGTHS)).repeat_interleave(lengths),
        )
        arrays = (torch.from_numpy(x) for x in (current, entropy, old))
        expected = trainer.metrics(*arrays, data, range(len(LENGTHS)), cfg)
        columns = (current, old, rollout, reference, data.advantages.numpy(), entropy)
        tokens = objectives.Tokens(*(x.tolist() for x in columns), LENGTHS)
        found = objectives.counted(tokens) | objectives.metrics(tokens, asdict(cfg))
        assert {name: value.hex() for name, value in found.items()} == {name: value.hex() for name, value in expected.items()}


@pytest.mark.parametrize("normalize_std", [True, False])
def test_advantages_have_the_trainers_bits(normalize_std):
    rewards = np.random.default_rng(3).random(24).astype(np.float32).tolist()
    rewards[8:12] = [0.1] * 4  # their mean rounds to a neighbour
    expected = trainer.group_advantages(rewards, 4, normalize_std)
    found = objectives.advantages(rewards, 4, normalize_std)
    assert [struct.pack("<f", x) for x in found] == [struct.pack("<f", x) for x in expected]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rates_are_the_trainers(schedule):
    cfg = Optimizer(lr=3e-4, schedule=schedule, warmup_steps=3)
    assert [objectives.learning_rate(asdict(cfg), i, 20) for i in range(22)] == [learning_rate(cfg, i, 20) for i in range(22)]

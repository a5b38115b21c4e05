"""Random numbers depend on their key and index alone; the generator equals the published vectors; sampling equals a plain reference."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import rng

# Known answers of Philox4x32-10 published with Salmon et al. (2011): counter, key, result.
PHILOX = [
    ([0] * 4, [0] * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
]


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX)
def test_philox_known_answers(counter, key, expected):
    assert rng.philox_reference(counter, key) == expected
    assert rng.philox(counter, key) == expected
    assert rng.philox([counter[0] ^ 1, *counter[1:]], key) != expected


def test_streams_do_not_depend_on_cuts():
    for make in (lambda n, o: rng.uniform((1, 2), n, o), lambda n, o: rng.normal((1, 2), (n,), o), lambda n, o: rng.gumbel(77, n, o)):
        whole = make(3001, 0)
        assert torch.equal(torch.cat([make(b - a, a) for a, b in ((0, 1), (1, 6), (6, 255), (255, 1030), (1030, 3001))]), whole)
        assert torch.equal(make(5, 2**34 + 3), make(10, 2**34)[3:8])
        assert make(0, 5).shape == (0,)


def test_keys_and_streams_are_distinct():
    draws = [rng.uniform(k, 8) for k in ((0,), (1,), (0, 0), (0, 1), (1, 0), (-1,), (2**64 - 2,))]
    assert len({tuple(d.tolist()) for d in draws}) == len(draws)
    with pytest.raises(ValueError, match="64 bits"):
        rng.uniform((2**64,), 1)


def test_uniform_is_uniform():
    u = rng.uniform((5,), 200_000).double()
    assert u.min() > 0 and u.max() < 1
    assert u.mean().item() == pytest.approx(0.5, abs=3e-3) and u.var().item() == pytest.approx(1 / 12, abs=1e-3)
    counts = torch.histc(u, 64, 0, 1)
    assert ((counts - 3125) ** 2 / 3125).sum().item() < 120  # chi-square with 63 degrees of freedom


def test_normal_is_normal_and_gumbel_is_gumbel():
    z = rng.normal((6,), (400, 1000)).double().flatten()
    moments = [z.mean(), z.var(), (z**3).mean(), (z**4).mean()]
    assert [round(m.item(), 1) for m in moments] == [0.0, 1.0, 0.0, 3.0]
    edges = torch.tensor([-3.0, -2, -1, 0, 1, 2, 3], dtype=torch.float64)
    cdf = 0.5 * (1 + torch.erf(edges / math.sqrt(2)))
    assert ((z[None, :] < edges[:, None]).double().mean(1) - cdf).abs().max() < 3e-3
    assert (z[0::4] * z[1::4]).mean().abs() < 1e-2  # the two numbers of a pair are uncorrelated
    g = rng.gumbel(9, 400_000).double()
    assert ((g[None, :] < edges[:, None]).double().mean(1) - torch.exp(-torch.exp(-edges))).abs().max() < 3e-3


def test_sample_keys_depend_on_each_field_only():
    keys = rng.sample_keys(1, 2, [3, 3, 3, 4], [0, 0, 1, 0], [7, 8, 7, 7])
    assert keys.dtype == torch.int64 and len(set(keys.tolist())) == 4
    assert rng.sample_keys(1, 2, torch.tensor([4]), torch.tensor([0]), torch.tensor([7])).item() == keys[3]
    others = [rng.sample_keys(s, i, [3], [0], [7]).item() for s, i in ((1, 2), (1, 3), (2, 2), (2, 1))]
    assert others[0] == keys[0] and len(set(others)) == 4
    with pytest.raises(ValueError):
        rng.sample_keys(0, 0, [-1], [0], [0])


def random_logits(rows: int, vocab: int) -> torch.Tensor:
    return rng.normal((11, vocab), (rows, vocab)) * 3


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (20, 0.9), (1, 1.0), (0, 1e-9), (5000, 0.999)])
def test_sample_equals_the_reference_and_rows_stand_alone(top_k, top_p):
    logits, keys = random_logits(17, 1111), rng.sample_keys(0, 0, range(17), [0] * 17, [5] * 17)
    ids = rng.sample(logits, 1 / 0.7, keys, top_k, top_p)
    assert torch.equal(ids, rng.sample_reference(logits, 1 / 0.7, keys, top_k, top_p))
    alone = [rng.sample(logits[i : i + 1], 1 / 0.7, keys[i : i + 1], top_k, top_p) for i in range(17)]
    assert torch.equal(torch.cat(alone), ids)
    if top_k == 1 or top_p < 1e-6:
        assert torch.equal(ids, logits.argmax(1))


def test_sample_follows_the_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(40_000, 4)
    keys = rng.sample_keys(3, 1, range(40_000), [0] * 40_000, [0] * 40_000)
    share = torch.bincount(rng.sample(logits, 0.5, keys), minlength=4) / 40_000
    assert (share - torch.softmax(logits[0] * 0.5, 0)).abs().max() < 0.01


def test_ties_go_to_the_lowest_id_and_greedy_is_argmax():
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, -0.0, -1.0]])
    keys = torch.zeros(2, dtype=torch.int64)
    assert rng.sample(logits, math.inf, keys).tolist() == [1, 0]
    assert rng.sample(logits, 1.0, keys, top_k=1).tolist() == [1, 0]
    assert rng.sample(logits[:0], 1.0, keys[:0]).shape == (0,)


def test_sample_rejects_bad_values():
    keys = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(FloatingPointError, match="row 0"):
        rng.sample(torch.tensor([[1.0, math.nan]]), 1.0, keys)
    with pytest.raises(ValueError):
        rng.sample(torch.zeros(1, 3), 1.0, keys, top_p=0.0)


def test_gumbel_reference():
    for key in (0, -7, 2**63 - 1):
        assert torch.equal(rng.gumbel_reference(key, 1001), rng.gumbel(key, 1001))

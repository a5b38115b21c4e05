"""Random streams and sampling in Triton, under the interpreter: the CPU's numbers and tokens."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import device, rng


@pytest.fixture
def triton(monkeypatch):
    """Calls a function with the Triton kernels in the place of C++."""

    def call(function, *args):
        monkeypatch.setattr(device, "interpreted", True)
        try:
            return function(*args)
        finally:
            monkeypatch.setattr(device, "interpreted", False)

    return call


@pytest.mark.parametrize("offset", [0, 1, 1022])
def test_streams(triton, offset):
    for stream, key in ((rng.uniform, (1, 2)), (lambda k, n, o: rng.normal(k, (n,), o), (3, 4)), (rng.gumbel, -5)):
        expected = stream(key, 2001, offset)
        assert torch.equal(triton(stream, key, 2001, offset), expected)
        assert not torch.equal(triton(stream, key, 2001, offset + 1), expected), "the control: another place in the stream"


def test_sample_keys(triton):
    columns = [7, 2**32 - 1, 0], [0, 1, 2], [5, 6, 2**31]
    assert torch.equal(triton(rng.sample_keys, 1, 2, *columns), rng.sample_keys(1, 2, *columns))


@pytest.mark.parametrize("inv_temp", [0.7, math.inf])
@pytest.mark.parametrize("restriction", [(0, 1.0), (5, 1.0), (0, 0.8), (40, 0.5)])
def test_tokens(triton, inv_temp, restriction):
    logits = torch.randn(6, 2500, generator=torch.Generator().manual_seed(1)) * 3
    logits[0, 100:] = logits[0, 17]  # ties
    logits[1, :2499] = -math.inf
    keys = rng.sample_keys(3, 4, range(6), [0] * 6, range(6))
    expected = rng.sample(logits, inv_temp, keys, *restriction)
    assert torch.equal(triton(rng.sample, logits, inv_temp, keys, *restriction), expected)
    strided = torch.full((6, 2600), math.nan)[:, 50:2550].copy_(logits)
    assert torch.equal(triton(rng.sample, strided, inv_temp, keys, *restriction), expected)
    if not math.isinf(inv_temp):
        assert not torch.equal(triton(rng.sample, logits, inv_temp, keys + 1, *restriction), expected), "the control: other noise"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_have_no_token(triton, bad):
    logits = torch.zeros(3, 1500)
    logits[1, 1400] = bad
    ids = triton(rng.sample, logits, 1.0, torch.arange(3))
    assert ids[1] == -1 and ids[0] >= 0 and ids[2] >= 0
    assert triton(rng.sample, logits, 1.0, torch.arange(3), 0, 0.9)[1] == -1

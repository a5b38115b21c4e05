"""Weights on their way to the engine: buckets of any size carry the same tensors in the same order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from stages.handover import broadcast_weights

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([-0.0]), "c": torch.ones(4), "d": torch.full((2, 2), 3.0)}


@pytest.fixture(params=[1, 2], ids=["one rank", "first of several"])
def trainer(request, monkeypatch):
    """Rank 0's view; its broadcast leaves rank 0's values as they are, and is counted."""
    sent: list[int] = []
    monkeypatch.setattr("stages.handover.dist.broadcast", lambda flat, source: sent.append(flat.numel()))
    return SimpleNamespace(
        sent=sent,
        mesh=SimpleNamespace(shape=SimpleNamespace(world_size=request.param)),
        shapes={name: x.shape for name, x in WEIGHTS.items()},
        slices=SimpleNamespace(whole_shape=lambda name, shape: shape),
        whole_tensors=lambda: iter(WEIGHTS.items()),
    )


@pytest.mark.parametrize(("bucket", "sizes"), [(1, [6, 1, 4, 4]), (7, [7, 8]), (8, [11, 4]), (100, [15])])
def test_every_bucket_size_hands_over_the_same_bits(trainer, bucket, sizes):
    got = list(broadcast_weights(trainer, bucket))
    assert [name for name, _ in got] == list(WEIGHTS)
    for name, tensor in got:
        assert tensor.shape == WEIGHTS[name].shape
        assert torch.equal(tensor.reshape(-1).view(torch.int32), WEIGHTS[name].reshape(-1).view(torch.int32))
    assert trainer.sent == (sizes if trainer.mesh.shape.world_size > 1 else [])

"""Recorded decode steps: padding, buffers and evidence, with a recorder that needs no GPU."""

from __future__ import annotations

import pytest
import torch

from stages.decode_graph import DecodeGraphs


def repeat(step):
    """Records nothing: the replay runs the step again on the same buffers, as a CUDA graph would."""
    step()
    return step


def graphs(sizes=(1, 2, 4)) -> DecodeGraphs:
    padding = {"x": torch.tensor([7.0, 7.0]), "position": torch.tensor(0)}
    return DecodeGraphs(lambda inputs: (inputs["x"] * 2 + inputs["position"][:, None], inputs["position"] + 1), sizes, padding, repeat)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_batch_is_padded_to_the_next_recorded_size(count):
    decode = graphs()
    x, position = torch.randn(count, 2), torch.arange(count)
    for _ in range(2):  # the second call must not see the first one's padding
        y, following = decode({"x": x, "position": position})
    assert torch.equal(y, x * 2 + position[:, None])
    assert torch.equal(following, position + 1)
    buffers = decode._graphs[next(s for s in decode.sizes if s >= count)][0]
    assert torch.equal(buffers["x"][count:], torch.full((len(buffers["x"]) - count, 2), 7.0))


def test_the_evidence_counts_replays():
    decode = graphs()
    decode({"x": torch.zeros(3, 2), "position": torch.zeros(3, dtype=torch.int64)})
    assert decode.describe() == {"graph_mode": "cuda_graph", "capture_sizes": [1, 2, 4], "graph_replays": 1}


def test_more_sequences_than_were_recorded_are_an_error():
    with pytest.raises(ValueError, match="at most 4"):
        graphs()({"x": torch.zeros(5, 2), "position": torch.zeros(5, dtype=torch.int64)})

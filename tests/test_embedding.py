"""Embedding: rows by bytes, split by vocabulary; the gradient is an exact sum, so order, split and place of tokens do not matter."""

from __future__ import annotations

import pytest
import torch

from kernels import embedding

V, H = 40, 20


def case() -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(0)
    return torch.randn(V, H, generator=gen), torch.randint(0, V, (300,), generator=gen), torch.randn(300, H, generator=gen)


def test_vocabulary_shards_add_up_to_the_rows():
    w, ids, _ = case()
    assert torch.equal(embedding.forward(ids, w), w[ids])
    parts = torch.stack([embedding.forward(ids, w[a:b], a) for a, b in ((0, 13), (13, 13), (13, 40))])
    assert torch.equal(parts.sum(0), w[ids]) and ((parts != 0).any(2).sum(0) == 1).all()
    assert embedding.forward(ids[:0], w).shape == (0, H)
    assert torch.equal(embedding.forward(ids, w[7:20], 7), embedding.forward_reference(ids, w[7:20], 7))


def test_gradient_equals_the_reference_in_any_order_and_split():
    _, ids, dx = case()
    whole, reference = (torch.zeros(V, H, dtype=torch.int64) for _ in range(2))
    embedding.accumulate_grad(whole, ids, dx, 0, 40)
    embedding.accumulate_grad_reference(reference, ids, dx, 0, 40)
    assert torch.equal(whole, reference)
    torch.testing.assert_close(whole.double() * 2.0**-40, torch.zeros(V, H).double().index_add(0, ids, dx.double()))
    parts = torch.zeros(V, H, dtype=torch.int64)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    for chunk in order.split(77):
        for a, b in ((17, 40), (0, 17)):
            embedding.accumulate_grad(parts[a:b], ids[chunk], torch.cat([dx, dx], 1)[chunk][:, H:], a, 40)
    assert torch.equal(parts, whole)
    # Control: float sums depend on the order.
    floats = [torch.zeros(V, H).index_add(0, ids[o], dx[o]) for o in (torch.arange(300), order)]
    assert not torch.equal(*floats)


def test_bf16_rows_are_bytes_and_gradients_are_widened_exactly():
    w, ids, dx = case()
    w, dx = w.bfloat16(), dx.bfloat16()
    assert torch.equal(embedding.forward(ids, w), w[ids]) and embedding.forward(ids, w).dtype == torch.bfloat16
    assert torch.equal(embedding.forward(ids.int(), w[3:9], 3), embedding.forward_reference(ids, w[3:9], 3))
    wide = torch.randn(300, 700, generator=torch.Generator().manual_seed(2)).bfloat16()
    for grad in (dx, wide, wide[:, 1:300]):
        accs = [torch.zeros(V, grad.shape[1], dtype=torch.int64) for _ in range(2)]
        embedding.accumulate_grad(accs[0], ids, grad, 0, 40)
        embedding.accumulate_grad(accs[1], ids, grad.float(), 0, 40)
        assert torch.equal(*accs) and accs[0].any()


def test_overflow_is_an_error():
    acc, ids = torch.zeros(V, H, dtype=torch.int64), torch.tensor([3])
    with pytest.raises(OverflowError, match="2\\^40"):
        embedding.accumulate_grad(acc, ids, torch.full((1, H), 2.0**21), 0, 40)
    acc = torch.zeros(V, H, dtype=torch.int64)
    with pytest.raises(OverflowError):  # the sum, not a value
        embedding.accumulate_grad(acc, ids.expand(5), torch.full((5, H), 2.0**20), 0, 40)


@pytest.mark.parametrize("column", [0, 7, 8, 19])  # in whole registers and in the rest of a row
def test_the_limits_are_sharp_in_every_lane(column):
    ids, limit = torch.tensor([1]), 1 << 62
    for start, step, fits in ((limit - 2, 1.0, True), (limit - 1, 1.0, False), (2 - limit, -1.0, True), (1 - limit, -1.0, False)):
        acc, dx = torch.zeros(V, H, dtype=torch.int64), torch.zeros(1, H)
        acc[1, column], dx[0, column] = start, step
        if fits:
            embedding.accumulate_grad(acc, ids, dx, 0, 0)
            assert acc[1, column].item() == start + int(step)
        else:
            with pytest.raises(OverflowError):
                embedding.accumulate_grad(acc, ids, dx, 0, 0)
    for bad in (float("nan"), float("inf"), 2.0**61, -(2.0**61)):
        dx = torch.zeros(1, H)
        dx[0, column] = bad
        with pytest.raises(OverflowError):
            embedding.accumulate_grad(torch.zeros(V, H, dtype=torch.int64), ids, dx, 0, 0)

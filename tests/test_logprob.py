"""Fused head: right within fp32 error, and the same bits for any split of vocabulary, rows and tokens, with or without stored logits."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels import linear, logprob, reduce

M, H, V, K_LEAF, LEAF = 13, 48, 300, 16, 64
NUM_LEAVES = 5  # of 64, 64, 64, 64, 44 tokens
INV_TEMP = 1 / 0.7


def case() -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(0)
    h, w = torch.randn(M, H, generator=gen), torch.randn(V, H, generator=gen) * 0.3
    return h, w, torch.randint(0, V, (M,), generator=gen), torch.randn(M, generator=gen), torch.randn(M, generator=gen) * 0.1


def shards(ranks: int) -> list[tuple[int, int, list[reduce.Node]]]:
    """(first id, last id, nodes) of each rank."""
    cuts = [NUM_LEAVES * r // ranks for r in range(ranks + 1)]
    return [(a * LEAF, min(b * LEAF, V), reduce.nodes(NUM_LEAVES, a, b)) for a, b in itertools.pairwise(cuts)]


def forward(ranks: int = 1, rows: slice = slice(None), from_logits: bool = False) -> tuple[torch.Tensor, ...]:
    h, w, targets, *_ = case()
    h, targets, stats, target = h[rows], targets[rows], {}, torch.zeros(len(targets[rows]))
    for a, b, nodes in shards(ranks):
        if from_logits:
            logits = linear.forward(h, w, K_LEAF)[:, a:b]
            values, own = logprob.partials_from_logits(logits, targets, INV_TEMP, LEAF, a, nodes)
        else:
            values, own = logprob.partials(h, w[a:b], targets, INV_TEMP, K_LEAF, LEAF, a, nodes)
        stats.update(zip(nodes, values, strict=True))
        target += own
    return logprob.finish(logprob.combine(stats, NUM_LEAVES), target)


def backward(ranks: int = 1, tiles: tuple[int, ...] = (0, 5, M)) -> tuple[torch.Tensor, torch.Tensor]:
    h, w, targets, g_logprob, g_entropy = case()
    _, entropy, lse = forward()
    acc, parts = torch.zeros(V, H, dtype=torch.int64), {}
    for a, b, nodes in shards(ranks):
        dh = logprob.backward(
            h, w[a:b], targets, lse, entropy, g_logprob, g_entropy, INV_TEMP, K_LEAF, LEAF, a, nodes, acc[a:b], torch.tensor(tiles), 40
        )  # fmt: skip
        parts.update(zip(nodes, dh, strict=True))
    return reduce.combine(parts, NUM_LEAVES), acc


def test_against_fp64():
    h, w, targets, g_logprob, g_entropy = case()
    h64, w64 = h.double().requires_grad_(), w.double().requires_grad_()
    logp = torch.log_softmax(h64 @ w64.t() * INV_TEMP, -1)
    exact = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)
    ours = forward()
    for a, b in zip(ours, exact, strict=False):
        torch.testing.assert_close(a.double(), b.detach(), rtol=0, atol=5e-6)
    torch.testing.assert_close(ours[2].double(), torch.logsumexp(h64 @ w64.t() * INV_TEMP, -1).detach(), rtol=0, atol=5e-6)
    (exact[0] * g_logprob + exact[1] * g_entropy).sum().backward()
    dh, acc = backward()
    torch.testing.assert_close(dh.double(), h64.grad, rtol=0, atol=5e-6)
    torch.testing.assert_close(acc.double() * 2.0**-40, w64.grad, rtol=0, atol=5e-6)


def test_stats_against_the_reference():
    h, w, targets, *_ = case()
    logits = linear.forward(h, w, K_LEAF)
    stats, target = logprob.partials_from_logits(logits, targets, INV_TEMP, LEAF, 0, [(i, i + 1) for i in range(NUM_LEAVES)])
    for i in range(NUM_LEAVES):
        exact = logprob.stats_reference(logits[:, i * LEAF : (i + 1) * LEAF].double(), INV_TEMP)
        torch.testing.assert_close(stats[i].double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(target, logits.gather(1, targets[:, None])[:, 0] * INV_TEMP)


@pytest.mark.parametrize("ranks", [2, 3, 5, 7])
def test_vocabulary_shards_give_the_same_bits(ranks):
    assert all(torch.equal(a, b) for a, b in zip(forward(ranks), forward(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(backward(ranks), backward(), strict=True))


def test_stored_logits_and_single_rows_give_the_same_bits():
    whole = forward()
    assert all(torch.equal(a, b) for a, b in zip(forward(from_logits=True), whole, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(forward(3, from_logits=True), whole, strict=True))
    for rows in (slice(0, 1), slice(3, 7), slice(12, 13), slice(5, 5)):
        assert all(torch.equal(a, b[rows]) for a, b in zip(forward(rows=rows), whole, strict=True))


def test_other_leaves_and_plain_halves_differ():
    """Controls: the leaf size and the tree decide the bits, so a sum in another order would be seen."""
    h, w, *_ = case()
    y = linear.forward(h, w, K_LEAF) * INV_TEMP
    halves = torch.logaddexp(torch.logsumexp(y[:, :150], 1), torch.logsumexp(y[:, 150:], 1))
    assert not torch.equal(halves, forward()[2])
    assert not torch.equal(backward(tiles=(0, 6, M))[1], backward()[1])


def test_masked_logits_have_no_weight():
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(3))
    logits[:, 70:290] = -torch.inf  # leaves 2 and 3 hold nothing
    stats, target = logprob.partials_from_logits(logits, torch.zeros(4, dtype=torch.int64), 1.0, LEAF, 0, [(0, NUM_LEAVES)])
    value, entropy, _ = logprob.finish(stats[0], target)
    kept = torch.cat([logits[:, :70], logits[:, 290:]], 1).double()
    logp = torch.log_softmax(kept, 1)
    torch.testing.assert_close(value.double(), logp[:, 0], rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy.double(), -(logp.exp() * logp).sum(1), rtol=0, atol=2e-6)


def test_misplaced_leaves_are_an_error():
    h, w, targets, *_ = case()
    for first_id, nodes in ((0, [(0, 4)]), (0, [(1, 6)]), (32, [(0, 5)])):
        with pytest.raises(ValueError, match="vocabulary leaves"):
            logprob.partials(h, w, targets, 1.0, K_LEAF, LEAF, first_id, nodes)


def test_leaves_of_nothing_are_refused():
    h, w, targets = torch.zeros(1, 4), torch.zeros(8, 4), torch.zeros(1, dtype=torch.int64)
    for k_leaf, vocab_leaf in ((0, 8), (4, 0)):
        with pytest.raises(ValueError, match="positive"):
            logprob.partials(h, w, targets, 1.0, k_leaf, vocab_leaf, 0, [(0, 1)])

"""Packing: every layout's rows, laid together, are the same rows."""

import pytest
import torch

from stages.batch import Sample, pack

LENGTHS = (7, 23, 1, 16, 40)


def samples() -> list[Sample]:
    out, offset = [], 0
    for i, n in enumerate(LENGTHS):
        prompt = max(1, n // 3)
        out.append(Sample(i, torch.arange(100 * i, 100 * i + n + 1), prompt, offset))
        offset += n + 1 - prompt
    return out


@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_context_parallel_ranks_partition_the_rows(cp):
    whole = pack(samples(), token_leaf=8)
    ranks = [pack(samples(), 8, cp, c) for c in range(cp)]
    ids = torch.cat([b.token_ids for b in ranks])
    assert sum(b.num_rows for b in ranks) == whole.num_rows == sum(LENGTHS)
    order = ranks[0].cp_order if cp > 1 else torch.arange(len(ids))
    assert torch.equal(ids[order], whole.token_ids)
    assert torch.equal(torch.cat([b.positions for b in ranks])[order], whole.positions)
    slots = torch.cat([b.head_slots for b in ranks]).sort()
    assert torch.equal(slots.values, torch.arange(len(slots.values)))  # each response token has exactly one owner
    assert torch.equal(torch.cat([b.head_targets for b in ranks])[slots.indices], whole.head_targets)


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_leaves_are_the_same_token_ranges_in_every_layout(cp):
    def leaves(batch):
        cuts = batch.tiles.tolist()
        return {tuple(batch.token_ids[a:b].tolist()) for a, b in zip(cuts, cuts[1:])}

    assert set().union(*(leaves(pack(samples(), 8, cp, c)) for c in range(cp))) == leaves(pack(samples(), 8))


def test_head_rows_predict_the_response_and_nothing_else():
    batch = pack(samples(), 8)
    assert torch.equal(batch.token_ids[batch.head_rows] + 1, batch.head_targets)
    assert len(batch.head_rows) == sum(n + 1 - max(1, n // 3) for n in LENGTHS)
    assert batch.head_tiles[-1] == len(batch.head_rows)


def test_no_samples_give_a_batch_of_no_rows():
    empty = pack([], 8, cp=2, c=1)
    assert empty.num_rows == 0 and empty.seqs.shape == (0, 4) and empty.tiles.tolist() == [0]

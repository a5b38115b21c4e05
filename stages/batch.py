"""Packed micro-batches: which rows of which samples a rank runs through the model, and how they map to leaves and keys.

Shape legend: M local rows, R rows of the whole samples (all context-parallel ranks), S samples, n token leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from pipeline.layout import owned_positions


@dataclass(frozen=True)
class Sample:
    """One prompt with its response, and its place in the packed response arrays."""

    index: int  # canonical index in the iteration, the same in every layout
    token_ids: Tensor  # int64 [prompt + response]
    prompt_length: int
    offset: int  # first response token in the packed arrays of the iteration

    @property
    def num_rows(self) -> int:
        """Rows of the model: the last token predicts nothing."""
        return len(self.token_ids) - 1


@dataclass(frozen=True)
class TokenBatch:
    """The rows of one micro-batch on one rank, in (sample, position) order."""

    token_ids: Tensor  # int64 [M]
    positions: Tensor  # int64 [M] absolute position in the sample
    tiles: Tensor  # int64 [n+1] row boundaries of the token leaves
    seqs: Tensor  # int64 [S,4] (first query row, end, first key row, number of keys); keys are whole samples
    whole_seqs: Tensor  # int64 [S,4] the same with the queries of the whole samples
    whole_positions: Tensor  # int64 [R]
    key_ranges: Tensor  # int64 [J,3] (sequence, a, b): absolute positions of the rank's own rows
    cp_counts: list[int]  # rows of each context-parallel rank
    cp_order: Tensor | None  # int64 [R] whole rows from the ranks' rows laid end to end; None without context parallelism
    head_rows: Tensor  # int64 [H] local rows whose target is a response token
    head_targets: Tensor  # int64 [H]
    head_tiles: Tensor  # int64 [n'+1] boundaries of token leaves among the head's rows
    head_slots: Tensor  # int64 [H] index of each target in the packed response arrays of the iteration
    sample_indices: list[int]  # canonical indices of the samples

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch with its tensors on another device, but for those that the host plans launches from."""
        planned = ("tiles", "head_tiles", "key_ranges")
        tensors = {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor) and f.name not in planned}
        return replace(self, **{name: x.to(device) for name, x in tensors.items()})


def pack(samples: list[Sample], token_leaf: int, cp: int = 1, c: int = 0) -> TokenBatch:
    """Rows of context-parallel rank `c` for these samples. No samples, or no owned leaf, gives a batch of zero rows."""
    owned = [[owned_positions(s.num_rows, token_leaf, cp, rank) for s in samples] for rank in range(cp)]
    ids, positions, tiles, seqs, whole_seqs, key_ranges = [], [], [0], [], [], []
    head_rows, head_targets, head_tiles, head_slots = [], [], [0], []
    row = key = 0
    for j, s in enumerate(samples):
        first = row
        for a, b in owned[c][j]:
            ids.append(s.token_ids[a:b])
            positions.append(torch.arange(a, b))
            key_ranges.append((j, a, b))
            for p in range(max(a, s.prompt_length - 1), b):
                head_rows.append(row + p - a)
                head_targets.append(int(s.token_ids[p + 1]))
                head_slots.append(s.offset + p + 1 - s.prompt_length)
            row += b - a
            tiles.append(row)
            if len(head_rows) > head_tiles[-1]:
                head_tiles.append(len(head_rows))
        seqs.append((first, row, key, s.num_rows))
        whole_seqs.append((key, key + s.num_rows, key, s.num_rows))
        key += s.num_rows
    return TokenBatch(
        token_ids=torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64),
        positions=torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64),
        tiles=torch.tensor(tiles),
        seqs=_table(seqs, 4),
        whole_seqs=_table(whole_seqs, 4),
        whole_positions=torch.cat([torch.arange(s.num_rows) for s in samples]) if samples else torch.empty(0, dtype=torch.int64),
        key_ranges=_table(key_ranges, 3),
        cp_counts=[sum(b - a for ranges in ranks for a, b in ranges) for ranks in owned],
        cp_order=_whole_order(samples, owned) if cp > 1 else None,
        head_rows=torch.tensor(head_rows, dtype=torch.int64),
        head_targets=torch.tensor(head_targets, dtype=torch.int64),
        head_tiles=torch.tensor(head_tiles),
        head_slots=torch.tensor(head_slots, dtype=torch.int64),
        sample_indices=[s.index for s in samples],
    )


def _table(rows: list[tuple[int, ...]], width: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, width)


def _whole_order(samples: list[Sample], owned: list[list[list[tuple[int, int]]]]) -> Tensor:
    """Where each row of the whole samples lies when the ranks' rows are laid end to end."""
    starts = [0]
    for s in samples:
        starts.append(starts[-1] + s.num_rows)
    order = torch.empty(starts[-1], dtype=torch.int64)
    row = 0
    for ranges_by_sample in owned:
        for j, ranges in enumerate(ranges_by_sample):
            for a, b in ranges:
                order[starts[j] + a : starts[j] + b] = torch.arange(row, row + b - a)
                row += b - a
    return order

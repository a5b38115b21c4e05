"""Two traces side by side: the first operation, in causal order, whose results differ, and the first element of it.

A trace is a folder of rankNNNNN.safetensors (see stages/traced_model.py): per operation the numbers of its rows, a hash per row and leaf,
and, where asked for, the bits of all values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

POSITION_BITS = 20  # a row's number is sample << 20 | position, or the row of a parameter
_LEAF_BITS = 16
StepOf = Callable[[np.ndarray], np.ndarray]  # row numbers -> the decoding step that computed each


@dataclass(frozen=True)
class Operation:
    """What one rank kept of one operation."""

    rank: int
    name: str  # "phase|pass|module|operation"
    dtype: str
    leaf: int  # elements of a leaf
    first: int  # the rank's first leaf
    rows: np.ndarray  # int64 [M]
    hashes: np.ndarray  # int64 [M,L]
    values: np.ndarray | None  # int32 or int16 words [M, N * words an element]

    @property
    def keys(self) -> np.ndarray:
        """[M,L]: one number for each row and leaf, the same in every layout."""
        return (self.rows[:, None] << _LEAF_BITS) | np.arange(self.first, self.first + self.hashes.shape[1])


@dataclass(frozen=True)
class Place:
    """The first row and leaf of an operation where two traces differ, or two ranks of one trace."""

    name: str
    row: int
    leaf: int
    sides: tuple[int, int]  # 0 or 1: which trace each of both values is from
    ranks: tuple[int | None, int | None]  # None: that trace has no such row
    unequal: int  # rows x leaves of the operation that differ
    total: int


def read_trace(folder: Path) -> dict[str, list[Operation]]:
    """Operations by name, in the order of their first call on rank 0; one entry for each rank that had rows of it."""
    from safetensors import safe_open

    trace: dict[str, list[Operation]] = {}
    for path in sorted(folder.glob("rank*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            stored = set(file.keys())
            for i, entry in enumerate(json.loads(file.metadata()["operations"])):
                own = trace.setdefault(entry["name"], [])
                if "leaf" in entry:
                    rows, hashes = (file.get_tensor(f"{i}.{part}") for part in ("rows", "hashes"))
                    values = file.get_tensor(f"{i}.values") if f"{i}.values" in stored else None
                    own.append(Operation(int(path.stem.removeprefix("rank")), **entry, rows=rows, hashes=hashes, values=values))
    return trace


def first_unequal(a: dict[str, list[Operation]], b: dict[str, list[Operation]], step_of: StepOf | None = None) -> Place | None:
    """The causally first difference. step_of: given where rows depend on earlier rows of the whole model, as in a rollout."""
    best: tuple[tuple[int, int], Place] | None = None
    for order, name in enumerate(dict.fromkeys([*a, *b])):
        found = _unequal(name, a.get(name, []), b.get(name, []), step_of)
        if found and (best is None or (found[0], order) < best[0]):
            best = (found[0], order), found[1]
        if best and step_of is None:
            break  # the operations are in causal order already
    return best and best[1]


def _unequal(name: str, a: list[Operation], b: list[Operation], step_of: StepOf | None) -> tuple[int, Place] | None:
    """(step, place) of the first row and leaf of one operation that is not the same everywhere."""
    chunks = [(side, op) for side, ops in enumerate((a, b)) for op in ops]
    if not chunks:
        return None
    keys = np.concatenate([op.keys.ravel() for _, op in chunks])
    hashes = np.concatenate([op.hashes.ravel() for _, op in chunks])
    source = np.repeat(np.arange(len(chunks)), [op.hashes.size for _, op in chunks])
    unique, first, which = np.unique(keys, return_index=True, return_inverse=True)  # `first`: the earliest chunk's value
    unequal = hashes != hashes[first][which]
    sides = np.array([side for side, _ in chunks])[source]
    lonely = (np.bincount(which, sides == 0) == 0) | (np.bincount(which, sides == 1) == 0)  # rows that one trace lacks
    wrong = lonely.copy()
    wrong[which[unequal]] = True
    if not wrong.any():
        return None
    places = np.flatnonzero(wrong)
    steps = step_of(unique[places] >> _LEAF_BITS) if step_of else np.zeros(len(places), dtype=np.int64)
    place = places[np.lexsort((unique[places], steps))[0]]
    own = np.flatnonzero((which == place) & unequal)
    other = None if not own.size else source[own[0]]
    one = chunks[source[first[place]]]
    two = (1 - one[0], None) if other is None else (chunks[other][0], chunks[other][1].rank)
    key = int(unique[place])
    return int(steps.min()), Place(
        name, key >> _LEAF_BITS, key & ((1 << _LEAF_BITS) - 1), (one[0], two[0]), (one[1].rank, two[1]), len(places), len(unique)
    )


def element(place: Place, traces: tuple[dict[str, list[Operation]], dict[str, list[Operation]]]) -> dict[str, Any]:
    """{element, values} of traces with values: the first unequal element of the place, counted over its row, and both bit patterns."""
    sides = [_leaf_bits(traces[side], place, rank) for side, rank in zip(place.sides, place.ranks)]
    if any(bits is None for bits in sides):
        return {"element": None, "values": ["missing" if bits is None else "present" for bits in sides]}
    one, two = sides
    index = int(np.flatnonzero((one.words != two.words).any(axis=1))[0])  # type: ignore[union-attr]
    return {"element": place.leaf * one.leaf + index, "values": [one.text(index), two.text(index)]}  # type: ignore[union-attr]


@dataclass(frozen=True)
class _Bits:
    words: np.ndarray  # [elements of a leaf, words an element]
    dtype: str
    leaf: int

    def text(self, index: int) -> str:
        raw = self.words[index].tobytes()
        number = f" ({np.frombuffer(raw, dtype=self.dtype)[0].item()!r})" if self.dtype != "bfloat16" else ""
        return f"0x{raw[::-1].hex()}{number}"


def _leaf_bits(trace: dict[str, list[Operation]], place: Place, rank: int | None) -> _Bits | None:
    for op in trace.get(place.name, []):
        if op.rank == rank and op.values is not None:
            row = op.values[np.flatnonzero(op.rows == place.row)[0]]
            width = {"bfloat16": 1, "float16": 1, "float64": 2, "int64": 2}.get(op.dtype, 1)
            start = (place.leaf - op.first) * op.leaf
            return _Bits(row.reshape(-1, width)[start : start + op.leaf], op.dtype, op.leaf)
    return None

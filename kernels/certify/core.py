"""Cases and their comparison, bit by bit.

Two results are equal when their shapes, dtypes and bit patterns are: +0 and -0 differ. A NaN equals a NaN of any payload, for IEEE 754
leaves payloads open and processors choose them differently; digests are taken with one payload for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Result = Any  # a tensor, a Python number, or a sequence of results
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Case(NamedTuple):
    """One equality. `got` runs what is certified, `expected` the rule; both may be called once only."""

    kind: str  # what varies: "rule", "rows", "tensor parallel", ...
    name: str
    got: Callable[[], Result]
    expected: Callable[[], Result]


class Difference(Exception):
    """The first place where two results differ."""

    def __init__(self, at: str, got: str, expected: str):
        super().__init__(f"{at}: got {got}, expected {expected}")
        self.at, self.got, self.expected = at, got, expected


@dataclass
class Tally:
    """What was compared for one kind of case."""

    cases: int = 0
    elements: int = 0
    sha256: Any = field(default_factory=hashlib.sha256)

    def add(self, tensors: list[Tensor]) -> None:
        self.cases += 1
        self.elements += sum(t.numel() for t in tensors)
        for t in tensors:
            self.sha256.update(f"{t.dtype} {tuple(t.shape)};".encode())
            self.sha256.update(bits(t).contiguous().view(-1).view(torch.uint8).numpy().data if t.numel() else b"")

    def record(self) -> dict[str, Any]:
        return {"cases": self.cases, "elements": self.elements, "sha256": self.sha256.hexdigest()}


def flat(result: Result) -> Iterator[Tensor]:
    """The tensors of a result, in main memory; numbers as fp64 or int64 tensors."""
    if isinstance(result, Tensor):
        yield result.detach().cpu()
    elif isinstance(result, int | float):
        yield torch.tensor(result, dtype=torch.int64 if isinstance(result, int) else torch.float64)
    else:
        for part in result:
            yield from flat(part)


def bits(t: Tensor) -> Tensor:
    """The bit patterns as integers, every NaN as the same one."""
    if t.is_floating_point():
        t = torch.where(t.isnan(), torch.full_like(t, torch.nan), t)
    return t.contiguous().view(_INTEGERS[t.element_size()])


def compare(got: list[Tensor], expected: list[Tensor]) -> None:
    """Raises `Difference` at the first element, shape or dtype that differs."""
    if len(got) != len(expected):
        raise Difference("results", str(len(got)), str(len(expected)))
    for i, (a, b) in enumerate(zip(got, expected)):
        where = f"result {i}" if len(got) > 1 else "result"
        if a.dtype != b.dtype or a.shape != b.shape:
            raise Difference(where, f"{a.dtype} {tuple(a.shape)}", f"{b.dtype} {tuple(b.shape)}")
        unequal = (bits(a) != bits(b)).reshape(-1)
        if bool(unequal.any()):
            first = int(unequal.nonzero()[0])
            index = [int(x) for x in torch.unravel_index(torch.tensor(first), a.shape)] if a.dim() else []
            raise Difference(
                f"{where}, element {index} ({int(unequal.sum())} of {a.numel()} differ)", hexadecimal(a, first), hexadecimal(b, first)
            )


def hexadecimal(t: Tensor, i: int) -> str:
    """0x3f800001 (1.0000001)."""
    width = t.element_size() * 8
    pattern = int(t.contiguous().view(-1)[i].view(_INTEGERS[t.element_size()])) & (1 << width) - 1
    return f"0x{pattern:0{width // 4}x} ({t.reshape(-1)[i].item()!r})"


def certify(
    tallies: dict[str, Tally],
    cases: Iterable[Case],
    under_test: Callable[[], Any],
    failed: Callable[[Case, Exception], None],
    out_of_time: Callable[[], bool],
) -> None:
    """Fills the tallies, by kind. `failed` gets every case that differs or raises, and may raise to stop there. TimeoutError when late."""
    for case in cases:
        if out_of_time():
            raise TimeoutError
        try:
            with under_test():
                got = list(flat(case.got()))
            compare(got, list(flat(case.expected())))
        except Exception as fault:
            failed(case, fault)
        else:
            tallies.setdefault(case.kind, Tally()).add(got)

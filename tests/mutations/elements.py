"""One bit of one stored element: the smallest change there is, made in the bytes of a safetensors file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_PATTERNS = {"F64": "<u8", "F32": "<u4", "F16": "<u2", "BF16": "<u2", "I64": "<u8", "I32": "<u4", "I16": "<u2", "I8": "u1", "U8": "u1"}


@dataclass(frozen=True)
class Stored:
    """Where a tensor's bytes lie in its file."""

    path: Path
    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    start: int  # byte in the file

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("F", "BF"))

    def patterns(self) -> np.ndarray:
        """The elements as unsigned integers."""
        return np.frombuffer(self.path.read_bytes(), _PATTERNS[self.dtype], self.count, self.start)

    def index(self, flat: int) -> list[int]:
        return [int(i) for i in np.unravel_index(flat, self.shape)]

    def chosen(self) -> int:
        """An element that depends on file and tensor only, so that all sorts of places come in."""
        text = f"{self.path.parent.name}/{self.path.name}/{self.name}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") % self.count

    def one_ulp(self, flat: int) -> None:
        """A float's next one away from zero, an integer's lowest bit."""
        pattern = int(self.patterns()[flat])
        self.put(flat, pattern + 1 if self.is_float else pattern ^ 1)

    def put(self, flat: int, pattern: int) -> None:
        data = bytearray(self.path.read_bytes())
        np.frombuffer(data, _PATTERNS[self.dtype], self.count, self.start)[flat] = pattern
        new_file(self.path, data)


def new_file(path: Path, data: bytes | bytearray) -> None:
    """In place of the old one, whose other names keep its bytes. Without the waiting for the disk that a stage does."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(data)
    temporary.replace(path)


def stored_tensors(path: Path) -> list[Stored]:
    """The tensors of a file, in file order. Reads the header itself: what is under test has no say in what is mutated."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    tensors = [Stored(path, name, e["dtype"], tuple(e["shape"]), 8 + length + e["data_offsets"][0]) for name, e in header.items()]
    return sorted(tensors, key=lambda tensor: tensor.start)


def stored(path: Path, name: str) -> Stored:
    return next(tensor for tensor in stored_tensors(path) if tensor.name == name)


def first_unequal(a: Path, b: Path) -> tuple[str, list[int]]:
    """Tensor and index where two files part, in file order."""
    for one, other in zip(stored_tensors(a), stored_tensors(b), strict=True):
        if one.shape == other.shape and (unequal := np.flatnonzero(one.patterns() != other.patterns())).size:
            return one.name, one.index(int(unequal[0]))
    raise ValueError(f"{a} and {b} hold the same bytes")

"""safetensors files by their bytes: the header taken apart, each tensor hashed as it streams by, small arrays as numbers."""

from __future__ import annotations

import array
import hashlib
import json
import math
import os
import sys
from dataclasses import dataclass
from typing import Any, BinaryIO

from . import document
from .folders import Folder

CHUNK = 1 << 22
MAX_HEADER = 100_000_000  # as safetensors itself has it
DTYPES = {  # name in the file: torch's name, bytes an element
    "BOOL": ("bool", 1), "BF16": ("bfloat16", 2), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
    **{f"U{n}": (f"uint{n}", n // 8) for n in (8, 16, 32, 64)},
    **{f"I{n}": (f"int{n}", n // 8) for n in (8, 16, 32, 64)},
    **{f"F{n}": (f"float{n}", n // 8) for n in (16, 32, 64)},
}  # fmt: skip
CODES = {"int32": "i", "float32": "f"}
Cache = dict[tuple[int, ...], dict[str, str]]


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the file's beginning
    size: int


class TensorFile:
    """A file that was read and checked once; ValueError or FileNotFoundError when it can't be."""

    def __init__(self, folder: Folder, name: str, cache: Cache | None = None) -> None:
        """cache: hashes of files that were read already; equal files of several runs are often one file on disk."""
        self.folder, self.name, self.shown = folder, name, f"{folder.shown}{name}"
        with folder.open(name) as file:
            self.entries = _entries(file, self.shown)
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            known = {} if cache is None else cache
            if identity not in known:
                known[identity] = {entry.name: _sha256(file, entry) for entry in self.entries.values()}
            self.hashes = known[identity]

    def raw(self, name: str) -> bytes:
        """Little-endian, row-major bytes."""
        entry = self.entries[name]
        with self.folder.open(self.name) as file:
            file.seek(entry.start)
            return file.read(entry.size)

    def first_unequal_byte(self, other: TensorFile, name: str) -> int | None:
        """Where two tensors of one shape part; None when they are the same."""
        entry = self.entries[name]
        with self.folder.open(self.name) as file, other.folder.open(other.name) as beside:
            file.seek(entry.start)
            beside.seek(other.entries[name].start)
            for start in range(0, entry.size, CHUNK):
                size = min(CHUNK, entry.size - start)
                a, b = file.read(size), beside.read(size)
                if a != b:
                    return start + next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        return None

    def numbers(self, name: str, dtype: str) -> array.array:
        """A row of int32 or fp32. ValueError when it is none."""
        entry = self.entries.get(name)
        if entry is None or entry.dtype != dtype or len(entry.shape) != 1:
            raise ValueError(
                f"{self.shown}: {name} is {f'{entry.dtype}{list(entry.shape)}' if entry else 'missing'}, expected a row of {dtype}"
            )
        values = array.array(CODES[dtype], self.raw(name))
        if sys.byteorder == "big":
            values.byteswap()
        return values


def _entries(file: BinaryIO, shown: str) -> dict[str, Entry]:
    size = file.seek(0, 2)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
        raise ValueError(f"{shown}: is no safetensors file")
    try:
        header = document.parse(file.read(length))
        header.pop("__metadata__", None)
        entries = [_entry(name, fields, 8 + length) for name, fields in header.items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{shown}: has a header that can't be read ({error})") from None
    end = 8 + length
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.size)):
        if entry.start != end:
            raise ValueError(f"{shown}: tensor {entry.name} starts at byte {entry.start}, the one before ends at {end}")
        end += entry.size
    if end != size:
        raise ValueError(f"{shown}: ends at byte {size}, its tensors at {end}")
    return {entry.name: entry for entry in entries}


def _entry(name: str, fields: dict[str, Any], offset: int) -> Entry:
    (start, stop), shape, (dtype, width) = fields["data_offsets"], tuple(fields["shape"]), DTYPES[fields["dtype"]]
    if not all(type(n) is int and n >= 0 for n in (start, stop, *shape)) or stop - start != width * math.prod(shape):
        raise ValueError(f"tensor {json.dumps(name)[:80]} of {dtype}{list(shape)} in {stop - start} bytes")
    return Entry(name, dtype, shape, offset + start, stop - start)


def _sha256(file: BinaryIO, entry: Entry) -> str:
    """Over the line `float32[2,3]` and the bytes."""
    digest = hashlib.sha256(f"{entry.dtype}[{','.join(map(str, entry.shape))}]\n".encode())
    file.seek(entry.start)
    left = entry.size
    while left:
        chunk = file.read(min(CHUNK, left))
        if not chunk:
            raise ValueError(f"tensor {entry.name} is cut off")
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest()

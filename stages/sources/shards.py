"""Sharded safetensors made into one file, by copying bytes: no tensor is ever whole in memory, so it works for any size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.progress import Progress
from stages.sources.local import check_plain_name

INDEX = "model.safetensors.index.json"
_CHUNK = 1 << 24
_LARGEST_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True)
class Piece:
    """Where one tensor's bytes lie."""

    name: str
    dtype: str  # as in the file: F32, BF16, ...
    shape: list[int]
    path: Path
    start: int  # in the file
    size: int


def merge_shards(folder: Path, where: str) -> None:
    """Replace the shards that `model.safetensors.index.json` lists by one model.safetensors: tensors sorted by name, fixed metadata.

    Does nothing where there is no index. Raises UserError when index and shards don't fit together.
    """
    index = folder / INDEX
    if not index.exists():
        return
    try:
        weight_map = dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"checkpoint.repo={where}: {INDEX} is malformed; fetch it again") from error
    shards = sorted(set(weight_map.values()))
    pieces: dict[str, Piece] = {}
    for shard in shards:
        check_plain_name(shard, where)
        pieces |= {piece.name: piece for piece in read_header(folder / shard, where) if weight_map.get(piece.name) == shard}
    if missing := sorted(set(weight_map) - set(pieces)):
        raise UserError(f"checkpoint.repo={where}: {INDEX} lists {missing[0]}, which {weight_map[missing[0]]} doesn't have; fetch it again")
    merged = folder / "merged.partial"
    _write(merged, [pieces[name] for name in sorted(pieces)])
    for name in [*shards, INDEX]:
        (folder / name).unlink()
    merged.rename(folder / "model.safetensors")


def read_header(path: Path, where: str) -> list[Piece]:
    """The tensors of a safetensors file. Raises UserError when it is missing, cut off, or something else: a pickle, a page of HTML."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        pieces = []
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            pieces.append(Piece(name, entry["dtype"], entry["shape"], path, 8 + length + start, stop - start))
        if sum(piece.size for piece in pieces) != size - 8 - length:
            raise ValueError("the tensors don't fill the file")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"checkpoint.repo={where}: {path.name} is no whole safetensors file ({error}); fetch or convert it again"
        ) from error
    return pieces


def _write(path: Path, pieces: list[Piece]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for piece in pieces:
        header[piece.name] = {"dtype": piece.dtype, "shape": piece.shape, "data_offsets": [offset, offset + piece.size]}
        offset += piece.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    with open(path, "wb") as write, Progress("join shards", offset, unit="B") as progress:
        write.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            with open(piece.path, "rb") as read:
                read.seek(piece.start)
                left = piece.size
                while left and (chunk := read.read(min(left, _CHUNK))):
                    write.write(chunk)
                    progress.advance(len(chunk))
                    left -= len(chunk)

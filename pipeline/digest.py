"""Canonical bytes and their sha256: the one definition of "equal" that every stage, report and verifier uses.

Only the standard library at import, as every stage's client reads this: a numpy or torch value means that its library is loaded already.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHUNK = 1 << 22
_SAFETENSORS_NAMES = {"BOOL": "bool", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_SAFETENSORS_NAMES |= {f"U{n}": f"uint{n}" for n in (8, 16, 32, 64)} | {f"I{n}": f"int{n}" for n in (8, 16, 32, 64)}
_SAFETENSORS_NAMES |= {f"F{n}": f"float{n}" for n in (16, 32, 64)}


# --- JSON --------------------------------------------------------------------------------------------------------------------
def canonical_json(obj: Any) -> str:
    """One string per value: sorted keys, no spaces, floats by their shortest round-trip repr, text as UTF-8.

    JSON has no NaN and no infinity: they become the strings "NaN", "Infinity", "-Infinity" (float() reads all three back).
    numpy scalars count as their Python values, tuples as lists. Raises TypeError for anything else, keys that are no strings included:
    json would write 1 and "1" as the same key.
    """
    return json.dumps(_plain(obj), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _plain(obj: Any) -> Any:
    np = sys.modules.get("numpy")
    if np is not None and isinstance(obj, np.generic):
        obj = obj.item()
    if isinstance(obj, float) and not math.isfinite(obj):
        return "NaN" if math.isnan(obj) else "Infinity" if obj > 0 else "-Infinity"
    if obj is None or isinstance(obj, str | int | float):
        return obj
    if isinstance(obj, Mapping):
        for key in obj:
            if not isinstance(key, str):
                raise TypeError(f"JSON key {key!r} is no string")
        return {key: _plain(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [_plain(value) for value in obj]
    raise TypeError(f"{type(obj).__name__} has no canonical JSON form")


def write_json(path: str | os.PathLike[str], obj: Any) -> None:
    """Write canonical JSON and a newline; the file appears whole or not at all (a new file, renamed over the old one)."""
    write_bytes(path, (canonical_json(obj) + "\n").encode())


def read_json(path: str | os.PathLike[str]) -> Any:
    """The value of a JSON file; a bare NaN or Infinity in it is an error, as is a key that comes twice."""

    def no_constant(text: str) -> None:
        raise ValueError(f"{path}: {text} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError(f"{path}: a key comes twice among {[key for key, _ in pairs]}")
        return dict(pairs)

    return json.loads(Path(path).read_bytes(), parse_constant=no_constant, object_pairs_hook=unique)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace `path` atomically; missing folders are made. Never writes in place: DVC's cache may share the old file's blocks."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes 0600, which another user of a shared cache could not read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


# --- hashes ------------------------------------------------------------------------------------------------------------------
def sha256_bytes(data: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_json(obj: Any) -> str:
    """sha256 over the UTF-8 bytes of `canonical_json(obj)`."""
    return sha256_bytes(canonical_json(obj).encode())


def sha256_file(path: str | os.PathLike[str]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_folder(folder: Path) -> str:
    """sha256 over the names and bytes of all files below a folder."""
    return sha256_json({path.relative_to(folder).as_posix(): sha256_file(path) for path in sorted(folder.rglob("*")) if path.is_file()})


def sha256_raw(dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> str:
    """sha256 over the line `float32[2,3]` and the little-endian, row-major bytes. dtype by torch's name, without "torch."."""
    digest = hashlib.sha256(f"{dtype}[{','.join(map(str, shape))}]\n".encode())
    digest.update(data)
    return digest.hexdigest()


def sha256_tensor(tensor: Any) -> str:
    """sha256 of a numpy array or a torch tensor of any device, strides and dtype: dtype, shape and little-endian contiguous bytes.

    +0 and -0 differ, and so do NaNs of different payload: the claim is about bytes.
    """
    np = sys.modules.get("numpy")
    if np is not None and isinstance(tensor, np.ndarray | np.generic):
        array = np.asarray(tensor)
        dtype = array.dtype.name
        if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and not np.little_endian):
            array = array.byteswap()
        return sha256_raw(dtype, array.shape, np.ascontiguousarray(array).tobytes())
    dtype = str(tensor.dtype).removeprefix("torch.")
    torch = sys.modules["torch"]  # there is a tensor, so it is loaded
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # as bytes: numpy lacks bfloat16 and float8
    return sha256_raw(dtype, tuple(tensor.shape), memoryview(raw.numpy()).cast("B") if raw.numel() else b"")


def tensors_digest(hashes: Mapping[str, str]) -> str:
    """One digest for a set of named tensors: sha256 over the canonical JSON of {name: sha256}."""
    return sha256_json(dict(hashes))


def float_hex(value: float | str) -> str:
    """Exact text of a float64 (`float.hex`); "nan", "inf", "-inf" for the rest. Reads the strings that `canonical_json` writes."""
    return float(value).hex()


# --- safetensors by bytes ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file: little-endian, row-major bytes, of any dtype (numpy lacks bfloat16)."""

    name: str
    dtype: str  # torch's name without "torch."
    shape: tuple[int, ...]
    data: bytes

    @property
    def sha256(self) -> str:
        """The same as `sha256_tensor` of the loaded tensor."""
        return sha256_raw(self.dtype, self.shape, self.data)


def iter_safetensors(path: str | os.PathLike[str], only: str | None = None) -> Iterator[StoredTensor]:
    """Every tensor of a file in file order (or the one called `only`), one in memory at a time.

    Raises ValueError when header and file size do not fit together: a cut or padded file is no evidence.
    """
    size = os.stat(path).st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path}: no safetensors file (header of {length} bytes in a file of {size})")
        header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            if start != end or stop > size - 8 - length:
                raise ValueError(f"{path}: tensor {name} lies at bytes {start}..{stop} of {size - 8 - length}")
            end = stop
            if only in (None, name):
                file.seek(8 + length + start)
                dtype = _SAFETENSORS_NAMES.get(entry["dtype"]) or str(entry["dtype"]).lower()
                yield StoredTensor(name, dtype, tuple(entry["shape"]), file.read(stop - start))
        if end != size - 8 - length:
            raise ValueError(f"{path}: {size - 8 - length - end} bytes after the last tensor")


def hash_safetensors(path: str | os.PathLike[str]) -> dict[str, str]:
    """{tensor name: sha256} over the bytes that are in the file now."""
    return {tensor.name: tensor.sha256 for tensor in iter_safetensors(path)}

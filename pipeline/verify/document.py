"""JSON read strictly: one value has one meaning, or the file is refused with a ValueError."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

MAX_DEPTH = 64
MAX_INT = 2**63


def read(path: Path) -> Any:
    return parse(path.read_bytes())


def parse(data: bytes) -> Any:
    """ValueError for anything but UTF-8, a key that comes twice, NaN and infinities, integers beyond 64 bits, half characters, depth."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8 text (byte {error.start})") from None
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_int=_int, parse_float=_float, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    _walk(value)
    return value


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _int(text: str) -> int:
    if len(text) > 20 or not -MAX_INT <= int(text) < MAX_INT:
        raise ValueError(f"an integer of {len(text)} characters is beyond 64 bits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond a double")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {json.dumps(twice)[:80]} comes twice in one object")
    return found


def _walk(value: Any) -> None:
    """Depth and text; without recursion, as the depth isn't known yet."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                below += [*node, *node.values()]
            elif isinstance(node, list):
                below += node
            elif isinstance(node, str) and not node.isascii():
                try:
                    node.encode()
                except UnicodeEncodeError:
                    raise ValueError("a text holds half a character (a lone surrogate)") from None
        level = below


def same(a: Any, b: Any) -> bool:
    """Equal as JSON: in type too, and 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
    if isinstance(a, dict):
        return repr(a) == repr(b) or (a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items()))
    if isinstance(a, list):
        return repr(a) == repr(b) or (len(a) == len(b) and all(map(same, a, b)))
    return a == b  # repr() writes no two values alike, but keys in their order


def canonical(value: Any) -> bytes:
    """The bytes that are hashed: sorted keys, no spaces, shortest floats, text as UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256(value: Any) -> str:
    return sha256_bytes(canonical(value))


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

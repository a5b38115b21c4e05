"""Doctored copies of a report: one value changed, one element dropped, two neighbours swapped. Whatever no check notices is named."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from . import form
from . import report as whole
from .document import same

Path = tuple[str | int, ...]
DIGIT = re.compile(r"[0-9]")
WORDS = {  # for words of a fixed list, the others that may stand there
    "alone": ("identical", "different"),
    "auto": ("avx2",),
    "cached": ("fresh", "executed"),
    "eos": ("length",),
    "executed": ("cached",),
    "fork": ("torchrun",),
    "fresh": ("cached",),
    "identical": ("alone", "different"),
    "length": ("eos",),
}


def unnoticed(report: dict[str, Any], per_place: int | None = None) -> list[str]:
    """What goes unnoticed somewhere: "changed: runs.*.performance.*.perf/rollout_time", "neighbours swapped: runs", ..."""
    return [label for label, *_ in escapes(report, per_place)]


def escapes(report: dict[str, Any], per_place: int | None = None) -> Iterator[tuple[str, Any, str | int, Any]]:
    """(label, container, key, new value) of the first doctoring of each label that goes unnoticed.

    per_place: of the places that differ in indices and steps only, how many are tried, from both ends; None = all. The report is changed in
    place, and back.
    """
    places: dict[str, list[Path]] = {}
    for path in paths_of(report):
        places.setdefault(pattern(path), []).append(path)
    for name, paths in places.items():
        found: set[str] = set()
        if per_place is not None and len(paths) > per_place:
            paths = paths[: -(-per_place // 2)] + paths[-(per_place // 2) :]
        for path in paths:
            for kind, parent, key, value in doctorings(report, path, ends_only=per_place is not None):
                if kind not in found and not _refused(report, parent, key, value):
                    found.add(kind)
                    yield f"{kind}: {name}", parent, key, value


def paths_of(node: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from paths_of(value, (*path, key))


def pattern(path: Path) -> str:
    """A path with every index and step as *."""
    return ".".join("*" if isinstance(key, int) or key.isdecimal() else key for key in path) or "report"


def doctorings(report: dict[str, Any], path: Path, ends_only: bool = False) -> Iterator[tuple[str, Any, str | int, Any]]:
    """(what is done, container, key, new value) of everything that is done to the node at `path`; of a list, at both ends or everywhere."""
    parent, key = {"": report}, ""
    for step in path:
        parent, key = parent[key], step  # type: ignore[index]
    node = parent[key]  # type: ignore[index]
    if isinstance(node, dict):
        for name in node:
            yield "field dropped", parent, key, {other: value for other, value in node.items() if other != name}
        yield "field added", parent, key, {**node, "unknown": next(iter(node.values()), 1)}
    elif isinstance(node, list):
        indices = [0, 1, len(node) - 2, len(node) - 1] if ends_only and len(node) > 4 else range(len(node))
        for i in indices:
            yield "element dropped", parent, key, node[:i] + node[i + 1 :]
        for i in indices:
            if i + 1 < len(node) and not same(node[i], node[i + 1]):
                yield "neighbours swapped", parent, key, [*node[:i], node[i + 1], node[i], *node[i + 2 :]]
        yield "element added", parent, key, [*node, node[-1] if node else "1"]
    else:
        for value in variants(node):
            yield "changed", parent, key, value


def variants(value: Any) -> list[Any]:
    """Another digit or character at either end, another sign, another type."""
    match value:
        case bool():
            return [not value, int(value), None]
        case int():
            return [value + 1, -value - 1, float(value), value == 1, None]
        case float():
            return [*_other_digits(value), -value, int(value), None]
        case str() if value:
            return [*WORDS.get(value, ()), _other(value[0]) + value[1:], value[:-1] + _other(value[-1]), "", None]
        case _:
            return ["1", 0, 1, False]


def _other(character: str) -> str:
    return "1" if character != "1" else "2"


def _other_digits(value: float) -> list[float]:
    """The first and the last digit of the shortest text, each as the next one; of the last, the first that is another number."""
    text = repr(value)
    mantissa, _, exponent = text.partition("e")
    exponent = f"e{exponent}" if exponent else ""
    found = []
    for i in (next(DIGIT.finditer(mantissa)).start(), len(mantissa) - 1):
        others = (f"{mantissa[:i]}{(int(mantissa[i]) + n) % 10}{mantissa[i + 1 :]}{exponent}" for n in range(1, 10))
        found.append(next(other for other in map(float, others) if other != value))
    return found


def _refused(report: dict[str, Any], parent: Any, key: str | int, value: Any) -> bool:
    before, parent[key] = parent[key], value
    if key == "":  # the report itself
        return is_refused(value)
    try:
        return is_refused(report)
    finally:
        parent[key] = before


def is_refused(report: dict[str, Any]) -> bool:
    """Whether `verify` would find a fault; the order is that which finds one soonest."""
    if whole.check_values(report, stop_at_first=True).faults:
        return True
    with contextlib.suppress(ValueError):
        form.check(report)
        return False
    return True

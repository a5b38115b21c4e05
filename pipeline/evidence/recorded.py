"""The JSON files that stages recorded, read with their types checked: a damaged file is a ValueError, never a surprise further on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.digest import float_hex, read_json


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. ValueError for another value, OSError without the file."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__} where an object is expected")
    return content


def read_metrics(path: Path) -> dict[str, dict[str, float | str]]:
    """metrics.json: {optimizer step: {metric: number, or "NaN", "Infinity", "-Infinity"}}. ValueError for anything else."""
    content = read_object(path)
    try:
        for step, values in content.items():
            int(step)
            hexes(values)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"holds something else than numbers by step ({error})") from None
    return content


def read_summary(path: Path) -> dict[str, Any]:
    """summary.json of a rollout, its metrics numbers. ValueError for anything else."""
    content = read_object(path)
    try:
        hexes(content.get("metrics", {}))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"metrics holds something else than numbers ({error})") from None
    return content


def hexes(metrics: Mapping[str, float | str]) -> dict[str, str]:
    return {name: float_hex(value) for name, value in metrics.items()}


def recorded_object(path: Path, read: Callable[[Path], dict[str, Any]] = read_object) -> dict[str, Any]:
    """What `read` returns; empty when the file is missing or damaged, which the evidence reports."""
    try:
        return read(path)
    except (OSError, ValueError):
        return {}

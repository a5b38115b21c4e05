"""Arithmetic of layouts, stated again: how many ranks a run has, what each of them calls, and how its layout is named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

ORACLE = "tp1cp1dp1"
DEGREES = re.compile(r"(?:tp([0-9]+))?(?:cp([0-9]+))?(?:dp([0-9]+))?(?:z([0-9]+))?")
NUMBERS = {"m": ("layout", "micro_batch"), "t": ("launch", "threads"), "s": ("launch", "segment")}


def degrees(name: str) -> tuple[int, int, int, int] | None:
    """(tp, cp, dp, ZeRO stage) of a name such as tp2dp2z3; None when it is none."""
    match = DEGREES.fullmatch(name)
    if not name or match is None:
        return None
    tp, cp, dp = (int(text or 1) for text in match.groups()[:3])
    return tp, cp, dp, int(match[4] or 0)


def name_of(tp: int, cp: int, dp: int, zero: int) -> str:
    axes = "".join(f"{axis}{n}" for axis, n in (("tp", tp), ("cp", cp), ("dp", dp)) if n > 1)
    return (axes or ORACLE) + (f"z{zero}" if zero else "")


def world_size(run: dict[str, Any]) -> int:
    """Ranks that train."""
    tp, cp, dp, _ = degrees(run["layout"]) or (1, 1, 1, 0)
    return tp * cp * dp


def mesh(layout: dict[str, Any], stage: str) -> tuple[int, int, int]:
    """(tp, cp, dp) of a stage. Sampling has a layout of its own; what that leaves open is as in training."""
    own = layout["rollout"] if stage == "rollout" else layout
    return own["tp"] or layout["tp"], own["cp"], own["dp"] or layout["dp"]


def rollout_size(layout: dict[str, Any]) -> int:
    """Ranks that sample."""
    tp, cp, dp = mesh(layout, "rollout")
    return tp * cp * dp


def micro_batches(layout: dict[str, Any], samples: int) -> int:
    """Forwards of one pass over so many samples: those of the rank with the most, as the others are padded."""
    dp = layout["dp"]
    size = (layout["micro_batch"] if layout["packing"] else 1) or max(1, -(-samples // dp))
    most = max(samples * (d + 1) // dp - samples * d // dp for d in range(dp))
    return -(-most // size)


def decode_steps(lengths: Sequence[int], batch: int) -> int:
    """Forwards of continuous batching: the first free slot takes the next sample, which holds it one forward a token."""
    slots = [0] * min(batch, len(lengths))
    for length in lengths:
        slots[slots.index(min(slots))] += length
    return max(slots, default=0)


def option_holds(option: str, execution: dict[str, Any]) -> bool:
    """Whether a part of a run's label, such as m1, nopack, rtp1cp2dp4, b3, t2, avx2, s1, is what its configuration says."""
    layout, launch = execution["layout"], execution["launch"]
    if option in ("pack", "nopack"):
        return layout["packing"] == (option == "pack")
    if option in ("avx512", "avx2", "scalar"):
        return launch["kernel_build"] == option
    if match := re.fullmatch(r"([mts])([0-9]+)", option):
        section, key = NUMBERS[match[1]]
        return execution[section][key] == int(match[2])
    if match := re.fullmatch(r"b([0-9]+)", option):
        return layout["rollout"]["batch_size"] == int(match[1])
    if match := re.fullmatch(r"rtp([0-9]+)cp([0-9]+)dp([0-9]+)", option):
        return mesh(layout, "rollout") == tuple(int(n) for n in match.groups())
    return False

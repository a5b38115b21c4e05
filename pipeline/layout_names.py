"""Names of layouts: everything that `layout=NAME` can say, and what a run's key calls its own.

tp2cp4dp2z3   degrees of training (left out: 1) and the ZeRO stage; tp1cp1dp1 is the oracle
-m1           layout.micro_batch              -nopack   layout.packing=false
-rtp1cp2dp4   layout.rollout.tp, .cp, .dp     -b3       layout.rollout.batch_size
-t2           launch.threads                  -avx2     launch.kernel_build (avx512, avx2, scalar)
-s1           launch.segment
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

from pipeline.layout import layout_name

_DEGREES = re.compile(r"(?:tp(?P<tp>\d+))?(?:cp(?P<cp>\d+))?(?:dp(?P<dp>\d+))?(?:z(?P<zero>\d+))?")
_ROLLOUT = re.compile(r"r(?=[tcd]p)(?:tp(?P<tp>\d+))?(?:cp(?P<cp>\d+))?(?:dp(?P<dp>\d+))?")
_NUMBERS = {"m": "layout.micro_batch", "b": "layout.rollout.batch_size", "t": "launch.threads", "s": "launch.segment"}
_PACKING = {"pack": True, "nopack": False}
_BUILDS = ("avx512", "avx2", "scalar")
_DEGREE_KEYS = ("layout.tp", "layout.cp", "layout.dp", "layout.zero")
_ROLLOUT_KEYS = ("layout.rollout.tp", "layout.rollout.cp", "layout.rollout.dp")

# Keys that a name spells out.
SPELLED = frozenset((*_DEGREE_KEYS, *_ROLLOUT_KEYS, *_NUMBERS.values(), "layout.packing", "launch.kernel_build"))
HELP = "degrees and options such as tp2cp4dp2z3-m1-nopack-rtp1dp4-b3-t2-avx2"


def parse(name: str) -> dict[str, Any] | None:
    """{key: value} of a name, None when it is none. A degree that is left out is 1, an option that is left out stays as it is."""
    degrees, *options = name.split("-")
    match = _DEGREES.fullmatch(degrees)
    if not degrees or match is None:
        return None
    values: dict[str, Any] = {f"layout.{axis}": int(match[axis] or 1) for axis in ("tp", "cp", "dp")}
    values["layout.zero"] = int(match["zero"] or 0)
    for option in options:
        found = _option(option)
        if found is None or set(found) & set(values):
            return None
        values |= found
    return values


def _option(text: str) -> dict[str, Any] | None:
    if text in _PACKING:
        return {"layout.packing": _PACKING[text]}
    if text in _BUILDS:
        return {"launch.kernel_build": text}
    if match := re.fullmatch(r"([mbts])(\d+)", text):
        return {_NUMBERS[match[1]]: int(match[2])}
    if match := _ROLLOUT.fullmatch(text):
        return {f"layout.rollout.{axis}": int(match[axis] or 1) for axis in ("tp", "cp", "dp")}
    return None


def name_of(layout: Any, launch: Any, keys: Set[str]) -> str:
    """The name of a run's layout: its degrees, and those options of which a key is among `keys`."""
    parts = [layout_name(layout.tp, layout.cp, layout.dp, layout.zero)]
    if keys & set(_ROLLOUT_KEYS):
        rollout = layout.rollout
        parts.append(f"rtp{rollout.tp or layout.tp}cp{rollout.cp}dp{rollout.dp or layout.dp}")
    numbers = {"m": layout.micro_batch, "b": layout.rollout.batch_size, "t": launch.threads, "s": launch.segment}
    parts += [f"{letter}{numbers[letter]}" for letter, key in _NUMBERS.items() if key in keys]
    parts += [text for text, packing in _PACKING.items() if "layout.packing" in keys and packing == layout.packing]
    return "-".join([*parts, *([launch.kernel_build] if "launch.kernel_build" in keys else [])])

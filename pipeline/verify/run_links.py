"""The report's chain against the files': each link in causal order, and on a difference the tensor, and the element where that is known."""

from __future__ import annotations

import math
from typing import Any

from .chains import digest_at, link_digest, places
from .checks import Checks
from .metrics import iterations
from .run_files import Place, RunFiles
from .tensor_files import TensorFile


def check_links(own: RunFiles, others: list[RunFiles], checks: Checks) -> None:
    """others: runs of the same report, whose files may still have what this run's should have."""
    found = [(0, None, "weights")] if (0, None, "weights") in own.parts else []
    for number, steps in enumerate(iterations(own.run), 1):
        found += places(number, steps)
    for place in found:
        digest, wanted = link_digest(own.parts[place]), digest_at(own.run, *place)
        if digest == wanted:
            checks.count += 1
        else:
            checks.that(False, own.key, f"{_where(place)}: {_what(own, others, place, wanted)}")
    if (0, None, "weights") in own.parts:
        result = own.chain()[-1]["digest"]
        checks.that(
            result == own.run["result_digest"], own.key, f"the files' result digest is {result}, the report's {own.run['result_digest']}"
        )
    else:
        checks.note(f"{own.key}: version 1 of the weights, which lies outside the run's folder, and so the result digest (give --root)")


def _where(place: Place) -> str:
    iteration, step, quantity = place
    return f"iteration {iteration}" + (f", step {step}" if step is not None else "") + f", {quantity}"


def _what(own: RunFiles, others: list[RunFiles], place: Place, wanted: str | None) -> str:
    parts = own.parts[place]
    if not parts:
        return "is not in the files"
    if wanted is None:
        return "is in the files, but the report says that it was missing"
    twin = next((other for other in others if link_digest(other.parts.get(place, {})) == wanted), None)
    if twin is not None:
        names = [name for name in {**parts, **twin.parts[place]} if parts.get(name) != twin.parts[place].get(name)]
        return _element(own, twin, place, names[0]) + (f" (and {len(names) - 1} more tensors)" if len(names) > 1 else "")
    recorded = _recorded(own, place)
    if recorded is not None and link_digest(recorded) == wanted:
        names = [name for name in {**parts, **recorded} if parts.get(name) != recorded.get(name)]
        return f"{', '.join(names[:3])}: the bytes are not those that were hashed when they were written"
    if place[2] in ("metrics", "rollout_metrics", "gradient_norm"):
        return _metric(own, place)
    return f"{', '.join(list(parts)[:3])}{', ...' if len(parts) > 3 else ''}: the files' digest is not {wanted[:12]}... of the report"


def _recorded(own: RunFiles, place: Place) -> dict[str, str] | None:
    """Hashes that were taken when weights or moments were written, from tensors.json."""
    source, quantity = own.sources.get(place), place[2]
    if source is None or quantity not in ("weights", "exp_avg", "exp_avg_sq"):
        return None
    prefix = "" if quantity == "weights" else f"{quantity}/"
    try:
        recorded = source.folder.json("tensors.json").get("sha256")
    except (OSError, ValueError):
        return None
    if not isinstance(recorded, dict):
        return None
    return {name.removeprefix(prefix): sha for name, sha in recorded.items() if name.startswith(prefix)}


def _element(own: RunFiles, twin: RunFiles, place: Place, part: str) -> str:
    """The first element of a tensor in which two runs' files differ."""
    source, other = own.sources.get(place), twin.sources.get(place)
    tensor = {"old_logprob": "old", "current_logprob": "current"}.get(place[2], part)
    if source is None or other is None or tensor not in source.entries or tensor not in other.entries:
        return f"{part} is {own.parts[place].get(part)}, in {twin.key} as reported {twin.parts[place].get(part)}"
    a, b = source.entries[tensor], other.entries[tensor]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{part} is {a.dtype}{list(a.shape)}, in {twin.key} as reported {b.dtype}{list(b.shape)}"
    return f"{part}{_first_unequal(source, other, tensor)} differs from that of {twin.key}, which is as reported"


def _first_unequal(a: TensorFile, b: TensorFile, tensor: str) -> str:
    """Its index, as [1, 2]."""
    entry, byte = a.entries[tensor], a.first_unequal_byte(b, tensor)
    if byte is None:
        return ""
    flat, index = byte * math.prod(entry.shape) // entry.size, []
    for n in reversed(entry.shape):
        flat, rest = divmod(flat, n)
        index.append(rest)
    return str(index[::-1])


def _metric(own: RunFiles, place: Place) -> str:
    iteration, step, quantity = place
    key = step or iterations(own.run)[iteration - 1][0]
    reported: dict[str, Any] = own.run["steps"][key]
    parts = own.parts[place]
    names = [name for name, value in parts.items() if name not in reported or float(reported[name]).hex() != value]
    return f"{', '.join(names) or quantity}: the file's value is not the reported one"

"""Where two runs part: back from the hashes to the stored tensors, in causal order, down to one element and its bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.digest import StoredTensor, iter_safetensors
from pipeline.evidence.chain import Evidence, Link, RunFiles

RESPONSE_ARRAYS = (
    "rollout_logprob",
    "reference_logprob",
    "old_logprob",
    "current_logprob",
    "entropy",
    "advantages",
)  # one value per response token
VALUES = ("metrics", "gradient_norm", "rollout_metrics")  # quantities whose parts are exact values, not hashes
_PLAIN = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64")


def find_first_difference(evidence: list[Evidence], oracle: int) -> dict[str, Any] | None:
    """The earliest place, in causal order, where any run leaves the oracle; None when all are equal.

    {iteration, step, quantity, tensor, index, values, runs, sample, position, unequal_tensors, text}: `values` are bit patterns
    (hashes for gradients, which are not stored), oracle first, as are `runs`.
    """
    reference = evidence[oracle]
    best: tuple[int, Link | None, Link | None, Evidence] | None = None
    for own in evidence[:oracle] + evidence[oracle + 1 :]:
        for position, (a, b) in enumerate(_pairs(reference, own)):
            if best is not None and position >= best[0]:
                break
            if (a.parts if a else {}) != (b.parts if b else {}):
                best = position, a, b, own
                break
    if best is None:
        return None
    _, a, b, own = best
    return _describe(a, b, reference.files, own.files)


def _pairs(a: Evidence, b: Evidence) -> list[tuple[Link | None, Link | None]]:
    """Links of both runs by place: the oracle's in order, then what only the other has."""
    pairs: list[tuple[Link | None, Link | None]] = [(link, b.by_place.get(link.place)) for link in a.links]
    return pairs + [(None, link) for link in b.links if link.place not in a.by_place]


def _describe(a: Link | None, b: Link | None, files_a: RunFiles, files_b: RunFiles) -> dict[str, Any]:
    link = a or b
    assert link is not None
    parts_a, parts_b = a.parts if a else {}, b.parts if b else {}
    unequal = [name for name in {**parts_a, **parts_b} if parts_a.get(name) != parts_b.get(name)]
    name = unequal[0]
    found: dict[str, Any] = {
        "index": None,
        "iteration": link.iteration,
        "position": None,
        "quantity": link.quantity,
        "runs": [files_a.key, files_b.key],
        "sample": None,
        "step": link.step,
        "tensor": name,
        "unequal_tensors": len(unequal),
        "values": [parts_a.get(name), parts_b.get(name)],
    }
    if a and b and a.source and b.source and name in parts_a and name in parts_b:
        found |= _element(a.source, b.source, link.tensors.get(name, name))
        found |= _logical_place(link.quantity, name, found["index"], files_a.iteration(link.iteration))
    return {**found, "text": _text(found)}


def _element(path_a: Path, path_b: Path, tensor: str) -> dict[str, Any]:
    """First unequal element of a tensor of two files: its index and both bit patterns."""
    a, b = (next(iter_safetensors(path, tensor)) for path in (path_a, path_b))
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return {"values": [f"{t.dtype}{list(t.shape)}" for t in (a, b)]}
    count = int(np.prod(a.shape, dtype=np.int64))
    rows = [np.frombuffer(t.data, dtype=np.uint8).reshape(count, -1) for t in (a, b)]
    unequal = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
    if not unequal.size:  # the file changed between hashing and now
        return {}
    first = int(unequal[0])
    index = [int(i) for i in np.unravel_index(first, a.shape)] if a.shape else []
    return {"index": index, "unequal_elements": int(unequal.size), "values": [_bits(t, first, count) for t in (a, b)]}


def _bits(tensor: StoredTensor, index: int, count: int) -> str:
    size = len(tensor.data) // count
    raw = tensor.data[index * size : (index + 1) * size]
    text = f"0x{raw[::-1].hex()}"
    return f"{text} ({np.frombuffer(raw, dtype=tensor.dtype)[0].item()!r})" if tensor.dtype in _PLAIN else text


def _logical_place(quantity: str, tensor: str, index: list[int] | None, folder: Path) -> dict[str, Any]:
    """Sample and token of an element of a packed array: `position` counts from the response's start, for tokens from the prompt's."""
    if not index or len(index) != 1 or quantity not in (*RESPONSE_ARRAYS, "tokens", "prompts", "rewards"):
        return {}
    if quantity not in RESPONSE_ARRAYS and tensor != "tokens":
        return {"sample": index[0]}
    from safetensors.numpy import load_file

    arrays = load_file(folder / "rollout" / "completions.safetensors")
    lengths = arrays["lengths"] if tensor == "tokens" else arrays["lengths"] - arrays["prompt_lengths"]
    ends = np.cumsum(lengths, dtype=np.int64)
    sample = int(np.searchsorted(ends, index[0], side="right"))
    return {"sample": sample, "position": int(index[0] - (ends[sample] - lengths[sample]))} if sample < len(ends) else {}


def _text(found: dict[str, Any]) -> str:
    where = f"iteration {found['iteration']}" + (f", step {found['step']}" if found["step"] is not None else "")
    index = "" if found["index"] is None else str(found["index"])
    sample = (
        ""
        if found["sample"] is None
        else f" (sample {found['sample']}" + ("" if found["position"] is None else f", token {found['position']}") + ")"
    )
    more = f"; {found['unequal_tensors']} parts of it differ" if found["unequal_tensors"] > 1 else ""
    (run_a, run_b), (a, b) = found["runs"], (_short(value, found["quantity"]) for value in found["values"])
    return f"{where}, {found['quantity']}: {found['tensor']}{index}{sample} is {a} in {run_a}, {b} in {run_b}{more}"


def _short(value: str | None, quantity: str) -> str:
    if value is None:
        return "missing"
    if quantity in VALUES:
        return f"{value} ({float.fromhex(value)!r})"
    return f"sha256 {value[:12]}..." if len(value) == 64 and not value.startswith("0x") else value

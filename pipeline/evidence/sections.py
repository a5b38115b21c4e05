"""Sections of the comparison record: one quantity over all runs, in the order of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.evidence.chain import GRADIENT_NORM, Evidence

LOGPROB_QUANTITIES = ("rollout_logprob", "reference_logprob", "old_logprob", "current_logprob", "rewards", "advantages")


def num_iterations(evidence: list[Evidence]) -> int:
    return max(own.files.iterations for own in evidence)


def optimizer_steps(evidence: list[Evidence]) -> list[tuple[int, int]]:
    files = evidence[0].files
    return [(i, step) for i in range(1, num_iterations(evidence) + 1) for step in files.steps(i)]


def _equal(values: Sequence[Any]) -> bool:
    """All there and all the same."""
    return all(value is not None and value == values[0] for value in values)


def _digest(own: Evidence, iteration: int, quantity: str, step: int | None = None) -> str | None:
    link = own.link(iteration, quantity, step)
    return link.digest if link else None


def _hashes(evidence: list[Evidence], iteration: int, quantity: str, step: int | None = None) -> dict[str, Any]:
    """Digests of one quantity in every run, and the names of its tensors that are not equal (or missing) somewhere."""
    parts = [link.parts if (link := own.link(iteration, quantity, step)) else {} for own in evidence]
    names = sorted({name for own in parts for name in own})
    unequal = [name for name in names if not _equal([own.get(name) for own in parts])]
    digests = [_digest(own, iteration, quantity, step) for own in evidence]
    return {"sha256": digests, "tensor_count": len(names), "unequal": unequal, "bitwise_equal": _equal(digests)}


def _renamed(section: dict[str, Any], name: str) -> dict[str, Any]:
    return {name if key == "unequal" else key: value for key, value in section.items()}


def parameters(evidence: list[Evidence], iteration: int) -> dict[str, Any]:
    hashes = _renamed(_hashes(evidence, iteration, "weights"), "unequal_parameter_tensors")
    return {"version": f"weight_v{iteration + 1:06d}", **hashes}


def tokens_equal(evidence: list[Evidence]) -> bool:
    return all(_equal([_digest(own, i, "tokens") for own in evidence]) for i in range(1, num_iterations(evidence) + 1))


def gradients(evidence: list[Evidence], iteration: int, step: int) -> dict[str, Any]:
    hashes = _renamed(_hashes(evidence, iteration, "gradients", step), "unequal_gradient_tensors")
    return {"iteration": iteration, "step": step, **hashes}


def adam_state(evidence: list[Evidence], iteration: int) -> dict[str, Any]:
    moments = {name: _renamed(_hashes(evidence, iteration, name), "unequal_tensors") for name in ("exp_avg", "exp_avg_sq")}
    equal = all(moment["bitwise_equal"] for moment in moments.values())
    return {"version": f"state_v{iteration + 1:06d}", **moments, "bitwise_equal": equal}


def logprobs(evidence: list[Evidence], iteration: int) -> dict[str, Any]:
    quantities = {}
    for quantity in LOGPROB_QUANTITIES:
        digests = [_digest(own, iteration, quantity) for own in evidence]
        quantities[quantity] = {"sha256": digests, "bitwise_equal": _equal(digests)}
    return {"iteration": iteration, "quantities": quantities, "bitwise_equal": all(q["bitwise_equal"] for q in quantities.values())}


def gradient_norm(evidence: list[Evidence], iteration: int, step: int) -> dict[str, Any]:
    links = [own.link(iteration, "gradient_norm", step) for own in evidence]
    texts = [link.parts.get(GRADIENT_NORM) if link else None for link in links]
    norms = [float.fromhex(text) if text else None for text in texts]
    known = [norm for norm in norms if norm is not None]
    spread = (max(known) - min(known)) / max(known) * 100 if known and max(known) else 0.0
    return {
        "exactly_equal": _equal(texts),
        "hex": texts,
        "iteration": iteration,
        "norms": norms,
        "relative_difference_percent": spread,
        "step": step,
    }


def metric_comparisons(evidence: list[Evidence]) -> list[dict[str, Any]]:
    """Every logged metric, by exact hex value; rollout/* by iteration, train/* by optimizer step."""
    rows = []
    for iteration in range(1, num_iterations(evidence) + 1):
        rows.append(_metric_row(evidence, iteration, None, ("rollout_metrics",)))
        rows += [
            _metric_row(evidence, iteration, step, ("metrics", "gradient_norm")) for i, step in optimizer_steps(evidence) if i == iteration
        ]
    return rows


def _metric_row(evidence: list[Evidence], iteration: int, step: int | None, quantities: tuple[str, ...]) -> dict[str, Any]:
    links = [[own.link(iteration, quantity, step) for quantity in quantities] for own in evidence]
    values = [{name: value for link in own if link for name, value in link.parts.items()} for own in links]
    names = sorted({name for own in values for name in own})
    unequal = {name: [own.get(name) for own in values] for name in names if not _equal([own.get(name) for own in values])}
    return {
        "bitwise_equal": bool(names) and not unequal,
        "iteration": iteration,
        "metric_count": len(names),
        "step": step,
        "unequal_metrics": unequal,
    }

"""The first difference that a report names: found again in the chains, in causal order."""

from __future__ import annotations

from typing import Any

from .chains import digest_at, places
from .checks import Checks
from .metrics import iterations

VALUES = ("metrics", "gradient_norm", "rollout_metrics")  # quantities whose parts are exact values, not hashes
PARTS = {  # tensors of the quantities that have a fixed set of them
    "prompts": ("prompt_ids", "sample_index", "prompt_lengths"),
    "tokens": ("tokens", "lengths", "finish"),
    "rewards": ("rewards",),
    "entropy": ("entropy",),
    "advantages": ("advantages",),
} | dict.fromkeys(("rollout_logprob", "reference_logprob", "old_logprob", "current_logprob"), ("logprobs",))


def check_difference(report: dict[str, Any], checks: Checks) -> None:
    found = report["first_difference"]
    if found is None:
        return
    runs = report["runs"]
    oracle = next(run for run in runs if run["run_id"] == report["oracle"])
    others = [run for run in runs if run is not oracle]
    place, run = _first(oracle, others)
    checks.equal("first_difference", [found["iteration"], found["step"], found["quantity"]], list(place))
    checks.equal("first_difference.runs", found["runs"], [oracle["run_id"], run["run_id"]])
    checks.equal("first_difference.readbacks", found["readbacks"], [_ran(oracle["validation"]), _ran(run["validation"])])
    checks.equal("first_difference.text", found["text"], _text(found))
    values = found["values"]
    checks.that(values[0] != values[1], "first_difference.values", "are the same")
    _check_tensor(report, found, oracle, run, checks)
    _check_element(found, checks)


def _first(oracle: dict[str, Any], others: list[dict[str, Any]]) -> tuple[tuple[int, int | None, str], dict[str, Any]]:
    """(iteration, step, quantity) and the first run that has another digest there than the oracle."""
    order = [(0, None, "weights")]
    for number, steps in enumerate(iterations(oracle), 1):
        order += places(number, steps)
    for iteration, step, quantity in order:
        for run in others:
            if digest_at(oracle, iteration, step, quantity) != digest_at(run, iteration, step, quantity):
                return (iteration, None if step is None else int(step), quantity), run
    raise ValueError("the chains are the same")


def _ran(validation: dict[str, Any]) -> dict[str, Any]:
    frameworks = validation["runtime_readbacks"]["frameworks"]
    modules = {side: {name: module["backend_ids"] for name, module in own["modules"].items()} for side, own in frameworks.items()}
    return {"kernel_builds": {side: own["kernel_builds"] for side, own in frameworks.items()}, "modules": modules}


def _check_tensor(report: dict[str, Any], found: dict[str, Any], oracle: dict[str, Any], run: dict[str, Any], checks: Checks) -> None:
    """The tensor and how many differ: by the metrics themselves, the names of the section, or the parts that a quantity has."""
    quantity, tensor, count = found["quantity"], found["tensor"], found["unequal_tensors"]
    if quantity in VALUES:
        steps = iterations(oracle)[found["iteration"] - 1]
        step = steps[0] if found["step"] is None else str(found["step"])
        a, b = (own["steps"].get(step, {}) for own in (oracle, run))
        hexes = [None if tensor not in own else float(own[tensor]).hex() for own in (a, b)]
        checks.equal("first_difference.values", found["values"], hexes)
        side = "rollout/" if quantity == "rollout_metrics" else "train/"
        unequal = [name for name in {**a, **b} if name.startswith(side) and a.get(name) != b.get(name)]
        unequal = [name for name in unequal if (name == "train/grad_norm") == (quantity == "gradient_norm") or side == "rollout/"]
        checks.equal("first_difference.unequal_tensors", count, len(unequal))
        return
    names = PARTS.get(quantity) or _section_names(report, found)
    checks.that(tensor in names, "first_difference.tensor", f"{tensor} is none of the unequal ones")
    exact = len(report["runs"]) == 2 and quantity not in PARTS or len(names) == 1
    checks.that(
        count == len(names) if exact else 0 < count <= len(names), "first_difference.unequal_tensors", f"is {count} of {len(names)}"
    )


def _section_names(report: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Unequal tensors of weights, moments or gradients, over all runs."""
    iteration, quantity = found["iteration"], found["quantity"]
    if quantity == "weights":
        return report["all_parameter_hash_comparisons"][iteration]["unequal_parameter_tensors"]
    if quantity == "gradients":
        rows = [row for row in report["gradient_hash_comparisons"] if row["step"] == found["step"]]
        return rows[0]["unequal_gradient_tensors"]
    return report["adam_state_comparisons"][iteration - 1][quantity]["unequal_tensors"]


def _check_element(found: dict[str, Any], checks: Checks) -> None:
    """An index comes with bit patterns, and with the sample that holds it where there are samples."""
    index, values = found["index"], found["values"]
    checks.equal("first_difference.unequal_elements", "unequal_elements" in found, index is not None)
    if index is not None:
        checks.that(all(value and value.startswith("0x") for value in values), "first_difference.values", "are no bit patterns")
        checks.that(found["unequal_elements"] > 0, "first_difference.unequal_elements", "are none")
    packed = index is not None and found["quantity"] in PARTS
    checks.that(packed or (found["sample"], found["position"]) == (None, None), "first_difference.sample", "is of a quantity that has none")
    if packed and found["position"] is None:  # one value a sample
        checks.equal("first_difference.sample", [found["sample"]], index)
    if found["position"] is not None and index:
        checks.that(
            0 <= found["position"] <= index[0] and 0 <= found["sample"] <= index[0], "first_difference.position", "is beyond the index"
        )


def _text(found: dict[str, Any]) -> str:
    where = f"iteration {found['iteration']}" + (f", step {found['step']}" if found["step"] is not None else "")
    index = "" if found["index"] is None else str(found["index"])
    sample = ""
    if found["sample"] is not None:
        sample = f" (sample {found['sample']}" + ("" if found["position"] is None else f", token {found['position']}") + ")"
    more = f"; {found['unequal_tensors']} parts of it differ" if found["unequal_tensors"] > 1 else ""
    (run_a, run_b), (a, b) = found["runs"], (_value(value, found["quantity"]) for value in found["values"])
    return f"{where}, {found['quantity']}: {found['tensor']}{index}{sample} is {a} in {run_a}, {b} in {run_b}{more}"


def _value(value: str | None, quantity: str) -> str:
    if value is None:
        return "missing"
    if quantity in VALUES:
        return f"{value} ({float.fromhex(value)!r})"
    return f"sha256 {value[:12]}..." if len(value) == 64 and not value.startswith("0x") else value

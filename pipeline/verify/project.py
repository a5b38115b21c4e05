"""The project folder around the runs: checkpoint, registry, environment and logs, as far as a report claims something of them."""

from __future__ import annotations

from typing import Any

from . import registry
from .checks import Checks
from .document import sha256, sha256_bytes
from .folders import Folder
from .layouts import world_size
from .metrics import iterations
from .performance import STAGES, operations
from .run_files import RunFiles


def settings_of(report: dict[str, Any], project: Folder, checks: Checks) -> dict[str, Any]:
    """{run: its configuration} from params.yaml, held against what the report says of it; without the runs that it does not list."""
    try:
        content = registry.parse(project.read("params.yaml").decode("utf-8"))
        runs = {run["run_id"]: content["runs"][run["run_id"]] for run in report["runs"] if run["run_id"] in content["runs"]}
        for run in report["runs"]:
            if run["run_id"] in runs:
                tracking = content["experiments"].get(report["experiment"], {}).get("tracking")
                _check_settings(report, run, runs[run["run_id"]], tracking, checks)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        checks.note(f"what the configuration decides: params.yaml is not as expected ({type(error).__name__}: {error})")
        return {}
    for run in report["runs"]:
        if run["run_id"] not in runs:
            checks.note(f"{run['run_id']}: what the configuration decides, as params.yaml does not list the run")
    return runs


def _check_settings(report: dict[str, Any], run: dict[str, Any], own: dict[str, Any], tracking: Any, checks: Checks) -> None:
    place = f"{run['run_id']}: params.yaml"
    checks.equal(f"{place}: experiment_digest", report["experiment_digest"], registry.experiment_digest(own))
    checks.equal(f"{place}: iterations", own["iterations"], len(run["chain"]) - 1)
    updates = {len(steps) for steps in iterations(run)}
    checks.equal(f"{place}: objective.num_updates", [own["objective"]["num_updates"]], sorted(updates))
    kernels = own["kernels"]
    parts = [f"+{module}={kernels[module]}" for module in ("attention", "ffn", "logp") if kernels[module] not in (None, kernels["case"])]
    checks.equal(f"{place}: case", report["case"], kernels["case"] + "".join(parts))
    samples = own["sampling"]["prompts_per_iteration"] * own["sampling"]["samples_per_prompt"]
    for step, row in run["tokens"].items():
        checks.equal(f"{run['run_id']}: sample_count of step {step}", row["sample_count"], samples)
    for name in ("launch", "layout"):
        checks.equal(f"{place}: {name}", run["execution"][name], own[name])
    if tracking is not None:
        checks.equal(f"{place}: tracking", run["execution"]["tracking"], tracking)


def check_environment(report: dict[str, Any], project: Folder, checks: Checks) -> None:
    if not report["environment"]:
        return
    try:
        checks.equal("environment, against env.json", report["environment"], project.json("env.json"))
    except (OSError, ValueError) as error:
        checks.note(f"environment: {error}")


def check_model_files(own: RunFiles, checkpoint: Folder, checks: Checks) -> None:
    """What decides the meaning of weights lies beside them: the checkpoint's own bytes."""
    for name in ("config.json", "generation_config.json"):
        first = _digest(checkpoint, name)
        for number in range(2, len(iterations(own.run)) + 2):
            folder = own.attempt(lambda number=number: own.folder.below("weights", f"weight_v{number:06d}"))
            if folder is not None:
                checks.equal(f"{own.key}: {folder.shown}{name}, as in the checkpoint", _digest(folder, name), first)


def _digest(folder: Folder, name: str) -> str | None:
    try:
        return sha256_bytes(folder.read(name))
    except FileNotFoundError:
        return None


def check_times(own: RunFiles, logs: Folder | None, checkpoint: Folder | None, checks: Checks) -> None:
    """Times are those of the logs, each of which names the bytes that its stage wrote; operations follow from lengths and model."""
    for number, steps in enumerate(iterations(own.run), 1):
        row, place = own.run["performance"][steps[0]], f"{own.key}: performance of step {steps[0]}"
        found = {stage: _log(own, logs, number, stage) for stage in STAGES}
        for stage, names in STAGES.items():
            for name in names:
                checks.equal(f"{place}: {name}, against the log", row[f"perf/{name}"], found[stage].get("timings", {}).get(name))
        rollout = found["rollout"].get("timings", {})
        if "wall_time" in rollout:
            checks.equal(f"{place}: train_wait_time, against the log", row["perf/train_wait_time"], rollout["wall_time"])
        if own.run["executed_or_cached"] and any(not log for log in found.values()):
            for stage in (stage for stage, log in found.items() if not log):
                checks.equal(f"{own.key}: executed_or_cached.{stage}", own.run["executed_or_cached"][stage], "cached")
        if checkpoint is not None and row["perf/log_probs_tflops"] is not None:
            own.attempt(lambda number=number, row=row, place=place: _check_operations(own, number, row, checkpoint, place, checks))


def fresh_command(own: RunFiles, logs: Folder | None) -> set[Any]:
    """The `verify=fresh` commands that the logs name."""
    return {_log(own, logs, number, stage).get("fresh") for number in range(1, len(iterations(own.run)) + 1) for stage in STAGES}


def _log(own: RunFiles, logs: Folder | None, number: int, stage: str) -> dict[str, Any]:
    """The log of a stage, if it names the bytes that lie there now."""
    if logs is None:
        return {}
    try:
        log = logs.below(own.key, f"i{number:04d}").json(f"{stage}.json")
        folder = own.folder.below(f"i{number:04d}", stage)
        output = sha256({name: sha256_bytes(folder.read(name)) for name in folder.names()})
    except (OSError, ValueError):
        return {}
    return log if log.get("output") == output and isinstance(log.get("timings"), dict) else {}


def _check_operations(own: RunFiles, number: int, row: dict[str, Any], checkpoint: Folder, place: str, checks: Checks) -> None:
    source = own.sources.get((number, None, "tokens"))
    if source is None:
        return
    try:
        total = forward_operations(source.numbers("lengths", "int32").tolist(), checkpoint.json("config.json"))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"config.json: describes no model ({type(error).__name__}: {error})") from None
    times = {name.removeprefix("perf/"): value for name, value in row.items()}
    checks.equal(f"{place}: operations of a forward pass", operations(times, world_size(own.run)), total)


def forward_operations(lengths: list[int], config: dict[str, Any]) -> int:
    """Multiply-adds count two. Of s tokens: L(2s h n d + 4s h n_kv d + 2 s^2 n d + 2s n d h + 6s h f) + 2s h V."""
    h, f, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    d = config.get("head_dim") or h // heads
    q, kv = heads * d, (config.get("num_key_value_heads") or heads) * d
    total = 0
    for s in lengths:
        layer = 2 * s * h * q + 4 * s * h * kv + 2 * s * s * q + 2 * s * q * h + 6 * s * h * f
        total += config["num_hidden_layers"] * layer + 2 * s * h * config["vocab_size"]
    return total

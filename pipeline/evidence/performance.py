"""Timings of a run under the names of the published report. They describe one execution and enter no digest.

Read from the ignored logs/. A log counts only while it names the sha256 of the output that lies there now: DVC may have brought back other
bytes from its cache, or the bytes of another machine. Then the numbers are None, with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.digest import read_json, sha256_folder
from pipeline.evidence.chain import RunFiles
from pipeline.layout import ModelShape

MEASURED = {
    "perf/update_weights_time": ("rollout", "update_weights_time"),
    "perf/rollout_time": ("rollout", "rollout_time"),
    "perf/data_preprocess_time": ("train", "data_preprocess_time"),
    "perf/ref_log_probs_time": ("ref_logprob", "ref_log_probs_time"),
    "perf/log_probs_time": ("train", "log_probs_time"),
    "perf/actor_train_time": ("train", "actor_train_time"),
}
TRAIN_PARTS = ("perf/data_preprocess_time", "perf/ref_log_probs_time", "perf/log_probs_time", "perf/actor_train_time")


def forward_flops(lengths: Sequence[int], shape: ModelShape) -> float:
    """Multiply-adds count two. Per sequence of s tokens: L(2s h n d + 4s h n_kv d + 2 s^2 n d + 2s n d h + 6s h f) + 2s h V."""
    h, q, kv = shape.hidden, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    total = 0.0
    for s in lengths:
        layer = 2 * s * h * q + 4 * s * h * kv + 2 * s * s * q + 2 * s * q * h + 6 * s * h * shape.intermediate
        total += shape.num_layers * layer + 2 * s * h * shape.vocab
    return total


def read_performance(files: RunFiles, lengths: dict[int, Sequence[int]], world_size: int) -> dict[str, dict[str, Any]]:
    """{step: {"perf/...": seconds, TFLOP/s per rank or tokens per second | None, "reason": str | None}}; lengths: tokens of each sample."""
    try:
        shape = ModelShape.from_hf(read_json(files.checkpoint_folder / "config.json"))
    except (OSError, ValueError, KeyError):
        shape = None
    result = {}
    for iteration in range(1, files.iterations + 1):
        result[str(files.steps(iteration)[0])] = _iteration(files, iteration, lengths.get(iteration, ()), world_size, shape)
    return result


def _iteration(files: RunFiles, iteration: int, lengths: Sequence[int], world_size: int, shape: ModelShape | None) -> dict[str, Any]:
    logs = {stage: _timings(files, iteration, stage) for stage in ("rollout", "ref_logprob", "train")}
    perf: dict[str, Any] = {name: logs[stage].get(key) for name, (stage, key) in MEASURED.items()}
    wait = _total([logs["rollout"].get(key) for key in ("update_weights_time", "rollout_time")])
    # between two training blocks lies the rollout stage, its start-up included where the log has the wall time
    perf["perf/train_wait_time"] = wait = logs["rollout"].get("wall_time", wait)
    perf["perf/train_time"] = train = _total([perf[name] for name in TRAIN_PARTS])
    perf["perf/step_time"] = step = _total([wait, train])
    perf["perf/wait_time_ratio"] = wait / step if step and wait is not None else None
    for name, factor in (("log_probs", 1), ("ref_log_probs", 1), ("actor_train", 3)):
        time = perf[f"perf/{name}_time"]
        rate = factor * forward_flops(lengths, shape) / world_size / 1e12 / time if shape and time and lengths else None
        perf[f"perf/{name}_tflops"] = rate
    time = perf["perf/actor_train_time"]
    perf["perf/actor_train_tok_per_s"] = sum(lengths) / time if time and lengths else None
    absent = sorted({stage for stage, key in MEASURED.values() if logs[stage].get(key) is None})
    perf["reason"] = f"no timing of {', '.join(absent)}: not run here (cached), or its log is gone" if absent else None
    return perf


def executed_or_cached(files: RunFiles) -> dict[str, str]:
    """{stage: "executed" when every iteration's output was computed here, by this run; else "cached"}."""
    numbers = range(1, files.iterations + 1)
    stages = ("rollout", "ref_logprob", "train")
    return {stage: "executed" if all(_timings(files, i, stage) for i in numbers) else "cached" for stage in stages}


def verification(runs: Sequence[RunFiles], command: str | None) -> str:
    """ "fresh" when every stage of every iteration was executed by the `verify=fresh` command of that name; else "cached"."""
    places = [(files, i, stage) for files in runs for i in range(1, files.iterations + 1) for stage in ("rollout", "ref_logprob", "train")]
    return "fresh" if command and all(_log(*place).get("fresh") == command for place in places) else "cached"


def _total(times: Sequence[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return sum(known) if len(known) == len(times) else None


def _timings(files: RunFiles, iteration: int, stage: str) -> dict[str, float]:
    return _log(files, iteration, stage).get("timings", {})


def _log(files: RunFiles, iteration: int, stage: str) -> dict[str, Any]:
    """The log of a stage, if it is that of the output which lies there now; else empty."""
    try:
        log = read_json(files.logs(iteration) / f"{stage}.json")
        same = log.get("output") == sha256_folder(files.iteration(iteration) / stage)
    except (OSError, ValueError):
        return {}
    return log if same else {}

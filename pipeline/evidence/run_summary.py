"""What the reports show of a run besides hashes: metrics by step, token counts and a few completions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from pipeline.evidence.chain import RunFiles
from pipeline.evidence.recorded import read_metrics, read_summary, recorded_object
from pipeline.records import tokens_sha256

MAX_COMPLETIONS = 8  # per iteration; the rest is in completions.jsonl


def steps(files: RunFiles) -> dict[str, dict[str, Any]]:
    """{optimizer step: train/* metrics, and with an iteration's first step its rollout/* metrics}."""
    result: dict[str, dict[str, Any]] = {}
    for iteration in range(1, files.iterations + 1):
        folder = files.iteration(iteration)
        metrics = recorded_object(folder / "train" / "metrics.json", read_metrics)
        rollout = recorded_object(folder / "rollout" / "summary.json", read_summary).get("metrics", {})
        for step in files.steps(iteration):
            result[str(step)] = {**metrics.get(str(step), {}), **(rollout if step == files.steps(iteration)[0] else {})}
    return result


def read_samples(files: RunFiles) -> dict[int, dict[str, np.ndarray]]:
    """{iteration: arrays of completions.safetensors}; iterations without a readable rollout are left out."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    samples = {}
    for iteration in range(1, files.iterations + 1):
        try:
            arrays = load_file(files.iteration(iteration) / "rollout" / "completions.safetensors")
        except (OSError, ValueError, KeyError, SafetensorError):
            continue
        if {"tokens", "lengths", "prompt_lengths"} <= set(arrays):  # a damaged header may have lost one: the evidence says so
            samples[iteration] = arrays
    return samples


def tokens(files: RunFiles) -> dict[str, dict[str, Any]]:
    """{first optimizer step of the iteration: sha256, sample_count, token_count}, from the arrays."""
    return {
        str(files.steps(iteration)[0]): {
            "sample_count": len(arrays["lengths"]),
            "sha256": tokens_sha256(arrays),
            "token_count": len(arrays["tokens"]),
        }
        for iteration, arrays in read_samples(files).items()
    }


def completions(files: RunFiles) -> list[dict[str, Any]]:
    """The first samples of each iteration, as text."""
    rows: list[dict[str, Any]] = []
    for iteration in range(1, files.iterations + 1):
        path = files.iteration(iteration) / "rollout" / "completions.jsonl"
        try:
            lines = path.read_text(encoding="utf-8").split("\n")[:MAX_COMPLETIONS]  # splitlines() would cut at U+2028 inside a text
            rows += [{"iteration": iteration, **json.loads(line)} for line in lines if line]
        except (OSError, ValueError):
            continue
    return rows

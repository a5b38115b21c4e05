"""What the reports show of a run besides hashes: metrics by step, token counts and a few completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.evidence.chain import RunFiles
from pipeline.evidence.recorded import read_metrics, read_summary, recorded_object
from pipeline.records import tokens_sha256

TOKEN_SAMPLES = 3  # shown token by token
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


def count_logprobs(files: RunFiles) -> int:
    """Stored logprobs of a run: rollout, reference, old and current of every response token."""
    return 4 * sum(int((a["lengths"] - a["prompt_lengths"]).sum()) for a in read_samples(files).values())


def token_logprobs(files: RunFiles) -> list[dict[str, Any]]:
    """The last iteration's first samples, one of a prompt, token by token: {iteration, sample, prompt, tokens: [{id, text, rollout,
    reference, old, current}]}, logprobs as fp32 values. Empty when a file is missing: the evidence says so."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    folder = files.iteration(files.iterations)
    try:
        arrays = load_file(folder / "rollout" / "completions.safetensors")
        train = load_file(folder / "train" / "logprobs.safetensors")
        reference = load_file(folder / "ref_logprob" / "ref.safetensors")["logprobs"]
        columns = {"rollout": arrays["logprobs"], "reference": reference, "old": train["old"], "current": train["current"]}
        tokenizer = _tokenizer(files.checkpoint_folder)
        ends, lengths, prompts = np.cumsum(arrays["lengths"]), arrays["lengths"], arrays["prompt_lengths"]
        offsets = np.concatenate([[0], np.cumsum(lengths - prompts)])
        rows = []
        for sample in np.unique(arrays["prompt_ids"], return_index=True)[1][:TOKEN_SAMPLES].tolist():
            whole = arrays["tokens"][ends[sample] - lengths[sample] : ends[sample]].tolist()
            ids, first = whole[prompts[sample] :], int(offsets[sample])
            values = [{name: float(column[first + i]) for name, column in columns.items()} for i in range(len(ids))]
            tokens = [{"id": t, "text": tokenizer.decode([t], skip_special_tokens=False), **v} for t, v in zip(ids, values, strict=True)]
            prompt = tokenizer.decode(whole[: prompts[sample]], skip_special_tokens=False)
            rows.append({"iteration": files.iterations, "sample": sample, "prompt": prompt, "tokens": tokens})
        return rows
    except (OSError, ValueError, KeyError, IndexError, SafetensorError):
        return []


def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))


def completions(files: RunFiles) -> list[dict[str, Any]]:
    """The first samples of each iteration, as text."""
    rows: list[dict[str, Any]] = []
    for iteration in range(1, files.iterations + 1):
        path = files.iteration(iteration) / "rollout" / "completions.jsonl"
        try:
            lines = path.read_text(encoding="utf-8").split("\n")[:MAX_COMPLETIONS]  # splitlines() would cut at U+2028 inside a text
            rows += [{"iteration": iteration, **json.loads(line)} for line in lines if line]
        except (OSError, ValueError, TypeError):  # TypeError: a line that holds no object
            continue
    return rows

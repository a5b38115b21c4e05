"""What the report shows of a run besides its chain, against the files it was read from."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

from . import document
from .chains import link_digest
from .checks import Checks
from .metrics import iterations
from .run_files import RunFiles
from .samples import SHOWN, TOKEN_SAMPLES


def check_claims(own: RunFiles, checks: Checks) -> None:
    for number, steps in enumerate(iterations(own.run), 1):
        _check_steps(own, number, steps, checks)
        _check_tokens(own, number, steps[0], checks)
        _check_completions(own, number, checks)


def _check_steps(own: RunFiles, number: int, steps: list[str], checks: Checks) -> None:
    """The metrics as they were written, in type too."""
    name = f"i{number:04d}"
    metrics, summary = own.json(name, "train", "metrics.json"), own.json(name, "rollout", "summary.json")
    checks.equal(f"{own.key}: {name}/train/metrics.json: steps", sorted(metrics), sorted(steps))
    for step in steps:
        written = metrics.get(step) if isinstance(metrics.get(step), dict) else {}
        rollout = summary.get("metrics") if step == steps[0] and isinstance(summary.get("metrics"), dict) else {}
        checks.equal(f"{own.key}: metrics of step {step}", own.run["steps"][step], {**written, **rollout})  # type: ignore[dict-item]


def _check_tokens(own: RunFiles, number: int, step: str, checks: Checks) -> None:
    source = own.sources.get((number, None, "tokens"))
    names = ("tokens", "lengths", "prompt_lengths")
    if source is None or not set(names) <= set(source.hashes):
        return  # a fault already
    found = {
        "sample_count": math.prod(source.entries["lengths"].shape),
        "sha256": link_digest({name: source.hashes[name] for name in names}),
        "token_count": math.prod(source.entries["tokens"].shape),
    }
    checks.equal(f"{own.key}: tokens of step {step}", own.run["tokens"].get(step), found)


def _check_completions(own: RunFiles, number: int, checks: Checks) -> None:
    """The first lines of the file."""
    data = own.attempt(lambda: own.folder.below(f"i{number:04d}", "rollout").read("completions.jsonl"))
    if data is not None:
        lines = [line for line in data.split(b"\n")[:SHOWN] if line]
        rows = own.attempt(lambda: [_row(line, number) for line in lines])
        reported = [row for row in own.run["completions"] if row["iteration"] == number]
        checks.equal(f"{own.key}: completions of iteration {number}", reported, rows)


def _row(line: bytes, number: int) -> dict[str, Any]:
    row = document.parse(line)
    if not isinstance(row, dict):
        raise ValueError(f"i{number:04d}/rollout/completions.jsonl: holds a line that is no object")
    return {"iteration": number, **row}


def check_recorded(own: RunFiles, checks: Checks) -> None:
    """Hashes and counts that the stages took when they wrote are those of the bytes now."""
    if (first := own.sources.get((0, None, "weights"))) is not None:
        recorded = own.attempt(lambda: first.folder.json("tensors.json"))
        checks.equal(
            f"{own.key}: {first.folder.shown}tensors.json", recorded, {"sha256": first.hashes, "digest": document.sha256(first.hashes)}
        )
    for number in range(1, len(iterations(own.run)) + 1):
        _check_summary(own, number, checks)
        weights = own.parts.get((number, None, "weights"), {})
        state = {
            f"{name}/{part}": sha for name in ("exp_avg", "exp_avg_sq") for part, sha in own.parts.get((number, None, name), {}).items()
        }
        for names, hashes in (("weights", f"weight_v{number + 1:06d}"), weights), (("state", f"state_v{number + 1:06d}"), state):
            recorded = own.json(*names, "tensors.json")
            checks.equal(f"{own.key}: {'/'.join(names)}/tensors.json", recorded, {"sha256": hashes, "digest": document.sha256(hashes)})
        done = sum(len(steps) for steps in iterations(own.run)[:number])
        checks.equal(f"{own.key}: state_v{number + 1:06d}/step.json", own.json(*names, "step.json"), {"step": done})
        for step in iterations(own.run)[number - 1]:
            gradients = own.parts.get((number, step, "gradients"), {})
            checks.equal(f"{own.key}: tensors with gradients in step {step}", sorted(gradients), sorted(weights))


def _check_summary(own: RunFiles, number: int, checks: Checks) -> None:
    place, step = f"i{number:04d}/rollout/summary.json", iterations(own.run)[number - 1][0]
    summary, row = own.json(f"i{number:04d}", "rollout", "summary.json"), own.run["tokens"][step]
    data = own.attempt(lambda: own.folder.below(f"i{number:04d}", "rollout").read("completions.jsonl")) or b""
    expected = {
        "completions_sha256": document.sha256_bytes(data),
        "sample_count": row["sample_count"],
        "token_count": row["token_count"],
        "tokens_sha256": row["sha256"],
        "weight_version": f"weight_v{number:06d}",
    }
    for name, value in expected.items():
        checks.equal(f"{own.key}: {place}: {name}", summary.get(name), value)


def check_token_logprobs(report: dict[str, Any], own: RunFiles, checks: Checks) -> None:
    """The single tokens that the report shows, of the oracle's last iteration. Their texts need the tokenizer, so they are not checked."""
    number = len(iterations(own.run))
    found = own.attempt(lambda: _token_rows(own, number))
    if found is not None:
        for row, wanted in zip(report["token_logprobs"], found):
            place = f"token_logprobs of sample {row['sample']}"
            checks.equal(f"{place}: sample", row["sample"], wanted[0])
            checks.equal(f"{place}: tokens", [{k: v for k, v in token.items() if k != "text"} for token in row["tokens"]], wanted[1])
        checks.equal("token_logprobs: number of samples", len(report["token_logprobs"]), len(found))


def _token_rows(own: RunFiles, number: int) -> list[tuple[int, list[dict[str, Any]]]]:
    rollout, reference, train = (own.arrays(number)[name] for name in ("rollout", "ref_logprob", "train"))
    if rollout is None or reference is None or train is None:
        raise ValueError(f"i{number:04d}: the token logprobs can't be read")
    ints = {name: rollout.numbers(name, "int32") for name in ("tokens", "lengths", "prompt_lengths", "prompt_ids")}
    columns = {
        "current": train.numbers("current", "float32"),
        "old": train.numbers("old", "float32"),
        "reference": reference.numbers("logprobs", "float32"),
        "rollout": rollout.numbers("logprobs", "float32"),
    }
    ends, prompts = list(accumulate(ints["lengths"])), ints["prompt_lengths"]
    offsets = [0, *accumulate(length - prompt for length, prompt in zip(ints["lengths"], prompts))]
    if any(len(column) != offsets[-1] for column in columns.values()) or len(ints["tokens"]) != ends[-1]:
        raise ValueError(f"i{number:04d}: arrays of tokens and logprobs have lengths that do not fit together")
    first: dict[int, int] = {}
    for sample, prompt in enumerate(ints["prompt_ids"]):
        first.setdefault(prompt, sample)
    rows = []
    for _, sample in sorted(first.items())[:TOKEN_SAMPLES]:
        ids = ints["tokens"][ends[sample] - ints["lengths"][sample] + prompts[sample] : ends[sample]]
        tokens = [{"id": token, **{name: column[offsets[sample] + i] for name, column in columns.items()}} for i, token in enumerate(ids)]
        rows.append((sample, tokens))
    return rows

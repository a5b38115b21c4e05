"""Text and logprobs that a report shows of single samples, as far as they follow from counts and from each other."""

from __future__ import annotations

import struct
from typing import Any

from .chains import digest_at, link_digest
from .checks import Checks
from .document import sha256_bytes
from .float32 import fp32
from .metrics import iterations

SHOWN = 8  # completions of an iteration
TOKEN_SAMPLES = 3  # samples shown token by token
COLUMNS = ("current", "old", "reference", "rollout")


def check_completions(report: dict[str, Any], checks: Checks) -> None:
    for run in report["runs"]:
        place, rows = f"{run['run_id']}: completions", run["completions"]
        numbers = [row["iteration"] for row in rows]
        expected = []
        for number, steps in enumerate(iterations(run), 1):
            expected += [number] * min(SHOWN, run["tokens"][steps[0]]["sample_count"])
        if run["validation"]["passed"]:
            checks.equal(f"{place}: iterations", numbers, expected)
        for number, steps in enumerate(iterations(run), 1):
            own = [row for row in rows if row["iteration"] == number]
            _check_samples(own, f"{place} of iteration {number}", checks)
            if len(own) == run["tokens"][steps[0]]["sample_count"]:
                _check_whole(run, number, run["steps"][steps[0]], own, f"{place} of iteration {number}", checks)


def _check_samples(rows: list[dict[str, Any]], place: str, checks: Checks) -> None:
    """In order: the samples of a prompt one after the other, each prompt with one text."""
    texts: dict[int, list[str]] = {}
    previous = None
    for i, row in enumerate(rows):
        checks.that(isinstance(row["reward"], float) and fp32(row["reward"]) == row["reward"], f"{place}, {i}: reward", "is no fp32 number")
        checks.that(row["num_tokens"] > 0, f"{place}, {i}: num_tokens", "are none")
        follows = row["sample"] == 0 or previous == (row["prompt_id"], row["sample"] - 1)
        checks.that(follows, f"{place}, {i}: sample", "does not follow on the one before")
        previous = row["prompt_id"], row["sample"]
        text = [row["prompt"], row["answer"]]
        checks.equal(f"{place}, {i}: prompt and answer of prompt {row['prompt_id']}", text, texts.setdefault(row["prompt_id"], text))


def _check_whole(run: dict[str, Any], number: int, m: dict[str, Any], rows: list[dict[str, Any]], place: str, checks: Checks) -> None:
    """All samples of the iteration are shown, so its rewards can be hashed and its counts added."""
    rewards = [row["reward"] for row in rows]
    raw = sha256_bytes(f"float32[{len(rewards)}]\n".encode() + struct.pack(f"<{len(rewards)}f", *rewards))
    checks.equal(f"{place}: rewards", link_digest({"rewards": raw}), digest_at(run, number, None, "rewards"))
    for name, total in (
        ("rollout/response_length_mean", sum(row["num_tokens"] for row in rows)),
        ("rollout/truncated_frac", sum(row["finish_reason"] == "length" for row in rows)),
    ):
        if name in m:
            checks.equal(f"{place}: {name}, by the samples", m[name], total / len(rows))


def check_token_logprobs(report: dict[str, Any], checks: Checks) -> None:
    oracle = next(run for run in report["runs"] if run["run_id"] == report["oracle"])
    number, steps = len(iterations(oracle)), iterations(oracle)[-1]
    rows = report["token_logprobs"]
    checks.that(len(rows) <= TOKEN_SAMPLES, "token_logprobs", f"are of more than {TOKEN_SAMPLES} samples")
    checks.that(len({row["sample"] for row in rows}) == len(rows), "token_logprobs: samples", "one is shown twice")
    shown = [row for row in oracle["completions"] if row["iteration"] == number]
    texts: dict[int, str] = {}
    agree = _agreeing(oracle, number)
    for row in rows:
        place = f"token_logprobs of sample {row['sample']}"
        checks.equal(f"{place}: iteration", row["iteration"], number)
        checks.that(row["sample"] < oracle["tokens"][steps[0]]["sample_count"], f"{place}: sample", "is beyond the iteration's samples")
        if row["sample"] < len(shown):
            _check_shown(row, shown, place, checks)
        for i, token in enumerate(row["tokens"]):
            where = f"{place}, token {i}"
            checks.that(
                all(isinstance(token[name], float) and fp32(token[name]) == token[name] for name in COLUMNS), where, "holds no fp32 numbers"
            )
            checks.that(token["id"] >= 0, f"{where}: id", "is negative")
            checks.equal(f"{where}: text of token {token['id']}", token["text"], texts.setdefault(token["id"], token["text"]))
            for name in agree:
                checks.equal(f"{where}: {name}, as the chain has it", token[name], token[agree[0]])
    if rows:
        firsts = [i for i, row in enumerate(shown) if row["prompt_id"] not in {other["prompt_id"] for other in shown[:i]}]
        firsts.sort(key=lambda i: shown[i]["prompt_id"])
        listed = [row["sample"] for row in rows if row["sample"] < len(shown)]
        if len(shown) == oracle["tokens"][steps[0]]["sample_count"]:
            checks.equal("token_logprobs: first samples of the prompts", listed, firsts[:TOKEN_SAMPLES])
        else:
            checks.that(set(listed) <= set(firsts), "token_logprobs: samples", "are not the first ones of their prompts")


def _agreeing(run: dict[str, Any], number: int) -> list[str]:
    """Columns that are the same bits: by the chain's hashes."""
    digests = {name: digest_at(run, number, None, f"{name}_logprob") for name in COLUMNS}
    return [name for name, digest in digests.items() if digest is not None and digest == digests["rollout"]]


def _check_shown(row: dict[str, Any], shown: list[dict[str, Any]], place: str, checks: Checks) -> None:
    completion = shown[row["sample"]]
    checks.equal(f"{place}: number of tokens", len(row["tokens"]), completion["num_tokens"])
    checks.that(completion["prompt"].strip() in row["prompt"], f"{place}: prompt", "is not that of the completion")

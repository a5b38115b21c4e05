"""The hand-overs between stages: one record per file, arrays in numpy, the same bytes in every layout.

Shape legend: S samples of the iteration in canonical order (prompt slot, then sample), N tokens of all samples, A response tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from pipeline.digest import sha256_tensor, tensors_digest

METADATA = {"format": "pt"}  # fixed, so that equal arrays are equal files


@dataclass(frozen=True)
class Prompt:
    prompt_id: int
    prompt: str
    answer: str
    token_ids: list[int]


def read_prompts(folder: Path) -> list[Prompt]:
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").split("\n")[:-1]  # not splitlines(): text may hold U+2028
    return [Prompt(**json.loads(line)) for line in lines]


def prompts_of_iteration(prompts: list[Prompt], count: int, iteration: int) -> list[Prompt]:
    """The next `count` prompts of the file, wrapping round."""
    start = (iteration - 1) * count
    return [prompts[(start + i) % len(prompts)] for i in range(count)]


@dataclass(frozen=True)
class Rollout:
    """What an iteration sampled."""

    tokens: np.ndarray  # int32 [N] prompt and response of each sample, end to end
    lengths: np.ndarray  # int32 [S] prompt + response
    prompt_lengths: np.ndarray  # int32 [S]
    prompt_ids: np.ndarray  # int32 [S]
    sample_index: np.ndarray  # int32 [S] within its prompt
    logprobs: np.ndarray  # fp32 [A] by the rollout engine
    rewards: np.ndarray  # fp32 [S]
    finish: np.ndarray  # int32 [S] 0 = end of sequence, 1 = length

    @property
    def response_lengths(self) -> np.ndarray:
        return self.lengths - self.prompt_lengths

    @property
    def response_offsets(self) -> np.ndarray:
        """[S+1] where each sample's response starts in the packed response arrays."""
        return np.concatenate([[0], np.cumsum(self.response_lengths, dtype=np.int64)])

    def sample_tokens(self) -> list[np.ndarray]:
        return np.split(self.tokens, np.cumsum(self.lengths)[:-1])

    def save(self, folder: Path) -> None:
        save_file({f.name: np.ascontiguousarray(getattr(self, f.name)) for f in fields(self)}, folder / "completions.safetensors", METADATA)

    @classmethod
    def load(cls, folder: Path) -> Rollout:
        return cls(**load_file(folder / "completions.safetensors"))


def save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path, METADATA)


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    return load_file(path)


def tokens_sha256(arrays: Mapping[str, np.ndarray]) -> str:
    """sha256 over all token ids of a Rollout's arrays, with lengths, so that a shifted boundary is another digest."""
    return tensors_digest({name: sha256_tensor(arrays[name]) for name in ("tokens", "lengths", "prompt_lengths")})


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows), encoding="utf-8")

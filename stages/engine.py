"""The rollout engine: KV cache, continuous batching, counter-based sampling.

`RolloutEngine` is the seam: another engine may take this one's place as long as it speaks token ids and reports the logprobs of
the full-vocabulary log-softmax of logits / temperature. Shape legend: M rows, G key/value heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import rng
from pipeline.config import Sampling
from stages.lockstep_ops import gather_vocab
from stages.model import Attention, CausalLM, inverse_temperature
from stages.weights import load_slices

EOS, LENGTH = 0, 1  # finish reasons


@dataclass(frozen=True)
class Request:
    """One sample to generate. (prompt_id, sample) key its random numbers, whatever rank, slot or batch it runs in."""

    prompt_id: int
    sample: int
    token_ids: list[int]


@dataclass
class Completion:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # fp32 values
    finish: int = LENGTH


class RolloutEngine(Protocol):
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> None: ...
    def generate(self, requests: list[Request], sampling: Sampling, seed: int, iteration: int) -> list[Completion]: ...
    def describe(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class LockstepEngine:
    """Generates with the trainer's model and kernels. Every tensor-parallel rank samples the same token from the same bits."""

    def __init__(self, model: CausalLM, eos_token_ids: set[int], batch_size: int):
        self.model, self.eos, self.batch_size = model, eos_token_ids, batch_size
        self.version: str | None = None
        self.forwards = 0
        self._cache: list[tuple[Tensor, Tensor]] = []

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> None:
        """Takes full tensors under Hugging Face names, keeps this rank's slices, and drops every cached key and value."""
        load_slices(self.model, tensors)
        self.version, self._cache = version, []

    @torch.no_grad()
    def generate(self, requests: list[Request], sampling: Sampling, seed: int, iteration: int) -> list[Completion]:
        """One completion per request, in their order."""
        if self.version is None:
            raise RuntimeError("generate() before load_weights()")
        completions = [Completion() for _ in requests]
        waiting, slots = deque(range(len(requests))), [-1] * min(self.batch_size, len(requests))
        length = max((len(r.token_ids) for r in requests), default=0) + sampling.max_new_tokens
        self._allocate(len(slots), length)
        while waiting or any(i >= 0 for i in slots):
            for slot, i in enumerate(slots):  # continuous batching: a free slot takes the next request at once
                if i < 0 and waiting:
                    slots[slot] = waiting.popleft()
            active = [(slot, i) for slot, i in enumerate(slots) if i >= 0]
            self._step(active, requests, completions, length, sampling, seed, iteration)
            for slot, i in active:
                if completions[i].finish == EOS or len(completions[i].token_ids) == sampling.max_new_tokens:
                    slots[slot] = -1
        return completions

    def _allocate(self, num_slots: int, length: int) -> None:
        shape, par = self.model.config.shape, self.model.par
        heads = shape.num_kv_heads // par.mesh.shape.tp
        rows = num_slots * length

        def empty() -> Tensor:
            return torch.empty(rows, heads, shape.head_dim)

        self._cache = [(empty(), empty()) for _ in range(shape.num_layers)]

    def _step(self, active, requests, completions, length, sampling: Sampling, seed: int, iteration: int) -> None:
        """One forward over all active sequences: whole prompts of new ones beside the last token of the others."""
        ids, positions, rows, seqs, last = [], [], [], [], []
        for slot, i in active:
            prompt, done = requests[i].token_ids, completions[i].token_ids
            new = prompt if not done else done[-1:]
            start = len(prompt) + len(done) - len(new)
            seqs.append((len(ids), len(ids) + len(new), slot * length, start + len(new)))
            positions.extend(range(start, start + len(new)))
            rows.extend(range(slot * length + start, slot * length + start + len(new)))
            ids.extend(new)
            last.append(len(ids) - 1)
        logits = self._logits(torch.tensor(ids), torch.tensor(positions), torch.tensor(rows), torch.tensor(seqs), torch.tensor(last))
        keys = rng.sample_keys(
            seed, iteration,
            [requests[i].prompt_id for _, i in active],
            [requests[i].sample for _, i in active],
            [len(requests[i].token_ids) + len(completions[i].token_ids) for _, i in active],
        )  # fmt: skip
        inv_temp = inverse_temperature(sampling.temperature)
        greedy = sampling.temperature == 0
        tokens = rng.sample(logits, math.inf if greedy else inv_temp, keys, sampling.top_k, sampling.top_p)
        logprobs = self.model.lm_head.ops.logprob_of(logits, tokens, inv_temp)
        for (_, i), token, logp in zip(active, tokens.tolist(), logprobs.tolist()):
            completions[i].token_ids.append(token)
            completions[i].logprobs.append(logp)
            if token in self.eos:
                completions[i].finish = EOS

    def _logits(self, ids: Tensor, positions: Tensor, rows: Tensor, seqs: Tensor, last: Tensor) -> Tensor:
        """Whole logits [sequences, V] of the last row of each sequence."""

        def attend(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache[module.layer]
            keys[rows], values[rows] = k, v
            return module.ops.cached_attention(q, keys, values, seqs, positions, module.scale)

        self.forwards += 1
        tiles = torch.tensor([0, len(ids)])  # no gradients here: any cut will do
        h = self.model.model(ids, positions, tiles, attend)
        return gather_vocab(self.model.par, self.model.lm_head.logits(h[last]))

    def describe(self) -> dict[str, Any]:
        readbacks = {m: asdict(r) for m, r in self.model.readbacks.items()}
        meaning = "fp32 log-softmax of logits / temperature over the full vocabulary"
        return {"engine": "lockstep", "graph_mode": "eager", "logprobs": meaning, "weight_version": self.version, "modules": readbacks}

    def close(self) -> None:
        self._cache = []

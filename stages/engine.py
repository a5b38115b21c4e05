"""The rollout engine: KV cache, continuous batching, counter-based sampling; on a GPU, recorded decode steps.

`RolloutEngine` is the seam: another engine may take this one's place as long as it speaks token ids and reports the logprobs of
the full-vocabulary log-softmax of logits / temperature. Shape legend: M rows, G key/value heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kernels import collectives, rng
from pipeline.layout import split_evenly
from stages.decode_graph import DecodeGraphs, Replay, record_cuda
from stages.lockstep_ops import gather_vocab
from stages.model import Attention, CausalLM, inverse_temperature
from stages.weights import load_slices

if TYPE_CHECKING:
    from pipeline.config import Sampling

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
    """Generates with the trainer's model and kernels. Every tensor-parallel rank samples the same token from the same bits.

    Context-parallel ranks share the rows of each forward: tokens of prompts, and sequences that are decoded. They exchange keys, values
    and tokens, so each holds the whole cache.

    graph_sizes: batch sizes whose decode step is recorded as a CUDA graph and replayed (none: every step is launched kernel by kernel).
    """

    def __init__(
        self,
        model: CausalLM,
        eos_token_ids: set[int],
        batch_size: int,
        graph_sizes: Sequence[int] = (),
        record: Callable[[Callable[[], None]], Replay] = record_cuda,
    ):
        self.model, self.eos, self.batch_size = model, eos_token_ids, batch_size
        model.join_projections()
        self.version: str | None = None
        self.forwards = 0
        self.device = model.lm_head.weight.device
        self._graph_sizes, self._record = sorted(graph_sizes), record
        self._graphs: DecodeGraphs | None = None
        self._length = 0  # cache rows of a sequence
        self._shape: tuple | None = None  # what the cache and the graphs were made for
        self._cache: list[tuple[Tensor, Tensor]] = []

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: str, sliced: bool = False) -> None:
        """Takes full tensors under Hugging Face names and keeps this rank's slices, in place; sliced: they are this rank's slices.

        No cached key or value outlives it: `generate` reads only rows that it has written.
        """
        load_slices(self.model, tensors, sliced)
        self.version = version

    @torch.no_grad()
    def generate(self, requests: list[Request], sampling: Sampling, seed: int, iteration: int) -> list[Completion]:
        """One completion per request, in their order."""
        if self.version is None:
            raise RuntimeError("generate() before load_weights()")
        self.forwards = 0
        completions = [Completion() for _ in requests]
        waiting, slots = deque(range(len(requests))), [-1] * min(self.batch_size, len(requests))
        length = max((len(r.token_ids) for r in requests), default=0) + sampling.max_new_tokens
        self._prepare(len(slots), length, sampling)
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

    # --- memory and graphs ------------------------------------------------------------------------------------------------------
    def _prepare(self, num_slots: int, length: int, sampling: Sampling) -> None:
        """The cache, with a spare row for the padding of recorded steps, and the recorded steps."""
        shape = num_slots, length, sampling.temperature, sampling.top_k, sampling.top_p
        if shape == self._shape:
            return
        config, par = self.model.config.shape, self.model.par
        heads, rows = config.num_kv_heads // par.mesh.shape.tp, num_slots * length + 1

        def empty() -> Tensor:
            return torch.empty(rows, heads, config.head_dim, dtype=par.dtype, device=self.device)

        self._graphs, self._cache, self._length = None, [], length  # the old ones go first
        self._cache = [(empty(), empty()) for _ in range(config.num_layers)]
        if self._graph_sizes and num_slots:
            padding = {"table": torch.tensor([0, 0, rows - 1, rows - 1, 0], device=self.device)}
            with self._uncounted():
                self._graphs = DecodeGraphs(lambda x: self._decode(x["table"], sampling), self._graph_sizes, padding, self._record)
        self._shape = shape

    @contextlib.contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Recording runs the model without a token to show for it."""
        counts = {m: r.call_count for m, r in self.model.readbacks.items()}
        yield
        for module, count in counts.items():
            self.model.readbacks[module].call_count = count

    # --- one step ---------------------------------------------------------------------------------------------------------------
    def _step(self, active, requests, completions, length, sampling: Sampling, seed: int, iteration: int) -> None:
        """One forward over all active sequences: whole prompts of new ones beside the last token of the others."""
        keys = rng.sample_keys(
            seed, iteration,
            [requests[i].prompt_id for _, i in active],
            [requests[i].sample for _, i in active],
            [len(requests[i].token_ids) + len(completions[i].token_ids) for _, i in active],
            self.device,
        )  # fmt: skip
        self.forwards += 1
        if self.model.par.mesh.cp_group is None and all(completions[i].token_ids for _, i in active):
            tokens, logprobs = self._decode_step(active, requests, completions, length, keys, sampling)
        else:
            tokens, logprobs = self._mixed_step(active, requests, completions, length, keys, sampling)
        for (_, i), token, logp in zip(active, tokens.tolist(), logprobs.tolist()):
            if token < 0:
                raise FloatingPointError(f"logits of prompt {requests[i].prompt_id}, sample {requests[i].sample} are not finite")
            completions[i].token_ids.append(token)
            completions[i].logprobs.append(logp)
            if token in self.eos:
                completions[i].finish = EOS

    def _mixed_step(self, active, requests, completions, length, keys: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """New rows of all sequences, laid end to end; of them this rank computes [first, stop)."""
        ids, positions, rows, spans, last = [], [], [], [], []
        for slot, i in active:
            prompt, done = requests[i].token_ids, completions[i].token_ids
            new = prompt if not done else done[-1:]
            start = len(prompt) + len(done) - len(new)
            spans.append((len(ids), len(ids) + len(new), slot * length, start + len(new)))
            positions.extend(range(start, start + len(new)))
            rows.extend(range(slot * length + start, slot * length + start + len(new)))
            ids.extend(new)
            last.append(len(ids) - 1)
        mesh = self.model.par.mesh
        cuts = [split_evenly(len(ids), mesh.shape.cp, c) for c in range(mesh.shape.cp)]
        first, stop = cuts[mesh.c]
        seqs = [(max(a, first) - first, min(b, stop) - first, k, n) for a, b, k, n in spans if a < stop and b > first]
        own = [j for j, row in enumerate(last) if first <= row < stop]  # sequences whose next token this rank samples
        table = torch.tensor(seqs, dtype=torch.int64, device=self.device).reshape(-1, 4)
        ids, positions, rows, last = (torch.tensor(x, device=self.device) for x in (ids, positions, rows, last))
        counts = [b - a for a, b in cuts]
        h = self._hidden(ids[first:stop], positions[first:stop], rows, table, torch.tensor([0, stop - first]), counts)
        return self._exchange(own, len(active), *self._sample(h[last[own] - first], keys[own], sampling))

    def _exchange(self, own: list[int], count: int, tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and logprobs of all `count` sequences, from the context-parallel ranks that sampled them. Bits are added to zeros."""
        group = self.model.par.mesh.cp_group
        if group is None:
            return tokens, logprobs
        whole = torch.zeros(2, count, dtype=torch.int64, device=self.device)
        whole[0, own], whole[1, own] = tokens, logprobs.view(torch.int32).long()
        collectives.exact_all_reduce(whole, group)
        return whole[0], whole[1].to(torch.int32).view(torch.float32)

    def _decode_step(self, active, requests, completions, length, keys: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Every sequence has one new token: a table of one row a sequence is all that a recorded step needs."""
        rows = []
        for slot, i in active:
            position = len(requests[i].token_ids) + len(completions[i].token_ids) - 1
            rows.append((completions[i].token_ids[-1], position, slot * length + position, slot * length))
        table = torch.cat((torch.tensor(rows, device=self.device), keys[:, None]), 1)
        if self._graphs is None or len(active) > self._graph_sizes[-1]:
            return self._decode(table, sampling)
        for module, readback in self.model.readbacks.items():  # what the replay runs
            readback.call_count += 1 if module == "logp" else len(self._cache)
        return self._graphs({"table": table})  # type: ignore[return-value]

    def _decode(self, table: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """table int64 [B,5]: token, position, cache row, first cache row of the sequence, sampling key. Reads nothing on the host."""
        ids, positions, rows, first, keys = table.t().contiguous()
        index = torch.arange(len(table), device=self.device)
        seqs = torch.stack((index, index + 1, first, positions + 1), 1)
        return self._sample(self._hidden(ids, positions, rows, seqs, torch.tensor([0, len(table)])), keys, sampling)

    def _hidden(self, ids: Tensor, positions: Tensor, rows: Tensor, seqs: Tensor, tiles: Tensor, counts: Sequence[int] = ()) -> Tensor:
        """Last hidden states [M,K] of this rank's rows. tiles: without gradients any cut will do. rows: where the new keys of all
        context-parallel ranks go, of which each computes counts[c]."""

        def attend(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache[module.layer]
            keys[rows], values[rows] = collectives.all_gather_rows([k, v], counts, self.model.par.mesh.cp_group)
            return module.ops.cached_attention(q, keys, values, seqs, positions, module.scale, self._length)

        return self.model.model(ids, positions, tiles, attend)

    def _sample(self, h: Tensor, keys: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """The next token of each row of h [B,K], int64 [B], and its logprob, fp32 [B]."""
        logits = gather_vocab(self.model.par, self.model.lm_head.logits(h))
        inv_temp = inverse_temperature(sampling.temperature)
        tokens = rng.sample(logits, math.inf if sampling.temperature == 0 else inv_temp, keys, sampling.top_k, sampling.top_p)
        return tokens, self.model.lm_head.ops.logprob_of(logits, tokens, inv_temp)

    def describe(self) -> dict[str, Any]:
        readbacks = {m: asdict(r) for m, r in self.model.readbacks.items()}
        meaning = "fp32 log-softmax of logits / temperature over the full vocabulary"
        graphs = self._graphs.describe() if self._graphs else {"graph_mode": "eager"}
        return {"engine": "lockstep", **graphs, "logprobs": meaning, "weight_version": self.version, "modules": readbacks}

    def close(self) -> None:
        self._cache, self._graphs, self._shape = [], None, None

"""A model, engine and trainer whose operations leave hashes: wrappers at the seam of operations, hooks on modules, taps in autograd.

An operation is named "phase|pass|module|operation": its forward result, or the gradient that its backward hands to its input. Shape legend:
M rows, N columns, L leaves of a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd import Function

from pipeline.evidence.traces import POSITION_BITS
from stages.batch import TokenBatch
from stages.engine import LockstepEngine
from stages.model import Attention, CausalLM, Embedding, FeedForward, Norm, Ops
from stages.optimizer import MOMENTS
from stages.parallel import Axis
from stages.trainer import Trainer, UpdateResult

_INT64 = torch.int64


class _Tap(Function):
    """Identity; the gradient that comes back is shown to `see`."""

    @staticmethod
    def forward(ctx, x, see):
        ctx.see = see
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.see(gradient)
        return gradient, None


class Trace:
    """Hashes of one rank, by operation, in the order of their first call. `sample`: canonical index of the engine's first request."""

    def __init__(self, model: nn.Module, values: str | None, phase: str, sample: int = 0):
        assert isinstance(model, CausalLM)
        self.par, self.phase, self.values, self.sample, self.update = model.par, phase, values, sample, 1
        self.rows = self.head_rows = torch.empty(0, dtype=_INT64)  # of the forward that is under way
        self.records: dict[str, dict[str, Any]] = {}
        self._multipliers: dict[int, Tensor] = {}
        model.register_forward_pre_hook(self._start_batch)
        for name, module in model.named_modules():
            self._attach(name, module)
        model.lm_head.ops = TracedOps(model.lm_head.ops, self, "lm_head", [])  # type: ignore[assignment]

    def _attach(self, name: str, module: nn.Module) -> None:
        heads, kv_heads, ffn = self.par.heads, self.par.kv_heads, self.par.ffn
        match module:
            case Attention():
                parts = [("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)]
                rope = {} if module.q_norm is not None else {"q_proj": "q_rope", "k_proj": "k_rope"}
                module.ops = TracedOps(module.ops, self, name, parts, "o_proj", rope)  # type: ignore[assignment]
                module.register_forward_pre_hook(lambda m, args: (*args[:4], self._attending(name, args[4])))
            case FeedForward():
                module.ops = TracedOps(module.ops, self, name, [("gate_proj", ffn), ("up_proj", ffn)], "down_proj")  # type: ignore
            case Embedding():
                module.register_forward_hook(lambda *call: self.give(f"{name}|embedding", call[-1]))  # type: ignore[arg-type]
            case Norm():
                self._attach_norm(name, module)

    def _attach_norm(self, name: str, module: Norm) -> None:
        kind = name.rpartition(".")[2]
        axis = {"q_norm": self.par.heads, "k_norm": self.par.kv_heads}.get(kind)

        def after(m: nn.Module, args: tuple, out: Tensor) -> Tensor:
            self.give(f"{name}|norm", out, axis)
            return out if axis is None else self.tap(f"{name.rpartition('.')[0]}|{kind[0]}_rope", out, axis)

        module.register_forward_pre_hook(lambda m, args: (self.tap(f"{name}|norm", args[0], axis), *args[1:]))
        module.register_forward_hook(after)

    def _attending(self, name: str, attend: Callable) -> Callable:
        def traced(module: Attention, *qkv: Tensor) -> Tensor:
            axes = self.par.heads, self.par.kv_heads, self.par.kv_heads
            for x, axis, part in zip(qkv[:2], axes, ("q_rope", "k_rope")):
                self.give(f"{name}|{part}", x, axis)
            out = attend(module, *(self.tap(f"{name}|attention d{part}", x, axis) for x, axis, part in zip(qkv, axes, "qkv", strict=True)))
            self.give(f"{name}|attention", out, self.par.heads)
            return out

        return traced

    def _start_batch(self, model: nn.Module, args: tuple[TokenBatch, float]) -> None:
        batch = args[0]
        samples = torch.tensor(batch.sample_indices, dtype=_INT64).repeat_interleave(batch.seqs[:, 1] - batch.seqs[:, 0])
        self.rows = (samples << POSITION_BITS) | batch.positions
        self.head_rows = self.rows[batch.head_rows]

    # --- what is kept -----------------------------------------------------------------------------------------------------------
    def _phase(self) -> str:
        if self.phase != "train":
            return self.phase
        return f"update {self.update}" if torch.is_grad_enabled() else "old logprobs"

    def give(self, name: str, x: Tensor, axis: Axis | None = None, rows: Tensor | None = None) -> None:
        """Keeps an operation's forward result x [M, ...]; axis: the one that tensor-parallel ranks share, None: each holds all of it."""
        self.keep(f"{self._phase()}|forward|{name}", x, axis, self.rows if rows is None else rows)

    def tap(self, name: str, x: Tensor, axis: Axis | None = None, rows: Tensor | None = None) -> Tensor:
        """x, whose gradient will be kept as what this operation's backward gives."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        whole, rows = f"{self._phase()}|backward|{name}", self.rows if rows is None else rows
        return _Tap.apply(x, lambda gradient: self.keep(whole, gradient, axis, rows))  # type: ignore[return-value]

    def keep(self, name: str, x: Tensor, axis: Axis | None, rows: Tensor, first: int | None = None) -> None:
        record = self.records.setdefault(name, {"rows": [], "hashes": [], "values": [], "dtype": str(x.dtype).removeprefix("torch.")})
        if not len(rows):
            return
        bits = as_bits(x.detach().reshape(len(rows), -1))
        words = bits.shape[1] // x[0].numel()  # int32 or int16 words of an element
        leaf = words * axis.leaf if axis else bits.shape[1]
        record["leaf"] = leaf // words
        record["first"] = first if first is not None else axis.ranges[self.par.mesh.t][0] if axis else 0
        record["rows"].append(rows)
        record["hashes"].append(self._hash(bits, leaf))
        if name == self.values:
            record["values"].append(bits)

    def _hash(self, bits: Tensor, leaf: int) -> Tensor:
        """[M,N] -> int64 [M,L]: a sum with odd multipliers, so one changed element shows. It finds places; equality is sha256."""
        if leaf not in self._multipliers:
            generator = torch.Generator().manual_seed(leaf)
            self._multipliers[leaf] = torch.randint(-(2**62), 2**62, (leaf,), generator=generator) * 2 + 1
        short = -bits.shape[1] % leaf
        leaves = torch.nn.functional.pad(bits.long(), (0, short)).unflatten(1, (-1, leaf))
        return (leaves * self._multipliers[leaf]).sum(2)

    def write(self, path: Path) -> None:
        tensors, names = {}, []
        for i, (name, record) in enumerate(self.records.items()):
            names.append({"name": name, **{key: record[key] for key in ("dtype", "leaf", "first") if key in record}})
            tensors |= {f"{i}.{part}": torch.cat(record[part]) for part in ("rows", "hashes", "values") if record[part]}
        save_file(tensors, path, {"operations": json.dumps(names)})


def as_bits(x: Tensor) -> Tensor:
    """x [M,N] as integers of at most 32 bits."""
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


class TracedOps:
    """The operations of one module, watched. parts: the linears that share its input; row: the linear that ends it; rope: what the
    gradient of a part comes from, where no norm stands between."""

    def __init__(
        self, ops: Ops, trace: Trace, module: str, parts: list[tuple[str, Axis]], row: str = "", rope: dict[str, str] | None = None
    ):
        self.ops, self.trace, self.module, self.parts, self.row_name, self.rope = ops, trace, module, parts, row, rope or {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def column(self, x: Tensor, weights, axes, tiles: Tensor) -> tuple[Tensor, ...]:
        x = self.trace.tap(f"{self.module}|{'+'.join(part for part, _ in self.parts)}", x)
        outputs = self.ops.column(x, weights, axes, tiles)
        t = self.trace.par.mesh.t
        joined = len(outputs) < len(self.parts)
        whole = outputs[0].split([axis.widths[t] for _, axis in self.parts], 1) if joined else outputs  # type: ignore[misc]
        for y, (part, axis) in zip(whole, self.parts, strict=True):
            self.trace.give(f"{self.module}|{part}", y, axis)
        if joined:
            return outputs
        pairs = zip(outputs, self.parts, strict=True)
        return tuple(self.trace.tap(f"{self.module}|{self.rope[p]}", y, axis) if p in self.rope else y for y, (p, axis) in pairs)

    def row(self, x: Tensor, weight: Tensor, axis: Axis, tiles: Tensor) -> Tensor:
        y = self.ops.row(self.trace.tap(f"{self.module}|{self.row_name}", x, axis), weight, axis, tiles)
        self.trace.give(f"{self.module}|{self.row_name}", y)
        return y

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        axis = self.trace.par.ffn
        gate, up = (self.trace.tap(f"{self.module}|swiglu d{part}", x, axis) for part, x in (("gate", gate), ("up", up)))
        y = self.ops.swiglu(gate, up)
        self.trace.give(f"{self.module}|swiglu", y, axis)
        return y

    def logprob(self, h: Tensor, w: Tensor, batch: TokenBatch, inv_temp: float) -> tuple[Tensor, Tensor]:
        rows = self.trace.head_rows
        outputs = self.ops.logprob(self.trace.tap("lm_head|logprob", h, None, rows), w, batch, inv_temp)
        for part, y in zip(("logprob", "entropy"), outputs):
            self.trace.give(f"lm_head|{part}", y, None, rows)
        return tuple(self.trace.tap(f"objective|d{part}", y, None, rows) for part, y in zip(("logprob", "entropy"), outputs))  # type: ignore

    def logits(self, h: Tensor, w: Tensor) -> Tensor:
        logits = self.ops.logits(h, w)
        self.trace.give("lm_head|logits", logits, self.trace.par.vocab, self.trace.head_rows)
        return logits

    def logprob_of(self, logits: Tensor, targets: Tensor, inv_temp: float) -> Tensor:
        logprobs = self.ops.logprob_of(logits, targets, inv_temp)
        self.trace.give("sampling|token", targets, None, self.trace.head_rows)
        self.trace.give("lm_head|logprob", logprobs, None, self.trace.head_rows)
        return logprobs


class TracedEngine(LockstepEngine):
    trace: Trace

    def _step(self, active, requests, completions, *args) -> None:
        self._samples = {slot: self.trace.sample + i for slot, i in active}
        self._last = {self.trace.sample + i: len(requests[i].token_ids) + len(completions[i].token_ids) - 1 for _, i in active}
        super()._step(active, requests, completions, *args)

    def _hidden(self, ids, positions, rows, seqs, tiles, counts=()) -> Tensor:
        first = sum(counts[: self.model.par.mesh.c])
        slots = (rows[first : first + len(ids)] // self._length).tolist()
        places = [(self._samples[slot], position) for slot, position in zip(slots, positions.tolist())]
        last = [position == self._last[sample] for sample, position in places]
        self.trace.rows = torch.tensor([sample << POSITION_BITS | position for sample, position in places], dtype=_INT64)
        self.trace.head_rows = self.trace.rows[torch.tensor(last, dtype=torch.bool)]
        return super()._hidden(ids, positions, rows, seqs, tiles, counts)


class TracedTrainer(Trainer):
    trace: Trace

    def _whole_gradients(self, divisor: float) -> dict[str, Tensor]:
        gradients = super()._whole_gradients(divisor)
        for name, gradient in gradients.items():
            self._keep("gradient", name, gradient)
        return gradients

    def _norm(self, gradients: dict[str, Tensor]) -> float:
        norm = super()._norm(gradients)
        name = f"update {self.trace.update}|optimizer|model|gradient norm"
        self.trace.keep(name, torch.tensor([[norm]], dtype=torch.float64), None, torch.zeros(1, dtype=_INT64))
        return norm

    def update(self, divisor: float) -> UpdateResult:
        result = super().update(divisor)
        for key in (*MOMENTS, None):
            for name, whole in self.whole_tensors(key):
                if whole is not None:
                    self._keep(key or "weight", name, whole, sliced=False)
        self.trace.update += 1
        return result

    def _keep(self, what: str, name: str, x: Tensor, sliced: bool = True) -> None:
        """A parameter's tensor, row by row; one whose columns are split over ranks, leaf by leaf."""
        par, span = self.trace.par, self.slices.span(name) if sliced else None
        axis = {"o_proj": par.heads, "down_proj": par.ffn}.get(name.split(".")[-2])
        first = axis.ranges[par.mesh.t][0] if axis and sliced else 0
        matrix, start = (x, span[1] if span and span[0] == 0 else 0) if x.dim() > 1 else (x[None], 0)
        rows = torch.arange(start, start + len(matrix))
        pass_name = "backward" if what == "gradient" else "optimizer"
        self.trace.keep(f"update {self.trace.update}|{pass_name}|{name}|{what}", matrix, axis, rows, first)

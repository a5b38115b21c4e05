"""Qwen3 and Llama: the forward pass on a seam of operations, with Hugging Face parameter names.

One code for prefill, decode, reference, old and current logprobs, and for any tensor- and context-parallel degree. A module holds
the rank's slice of each parameter; `attend` says where keys and values come from (the packed batch, or an engine's cache).
Shape legend: M rows, K hidden size, H and G query and key/value heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kernels import rope
from pipeline.config import Kernels
from pipeline.errors import UserError
from pipeline.evidence.readbacks import BACKEND_IDS, MODULES, expected_implementation
from pipeline.layout import ModelShape
from stages.batch import TokenBatch
from stages.lockstep_ops import LockstepOps, embed, norm, rotate
from stages.parallel import Parallel
from stages.torch_ops import TorchOps

Ops = LockstepOps | TorchOps
Attend = Callable[["Attention", Tensor, Tensor, Tensor], Tensor]  # (module, q [M,H,D], k [M,G,D], v [M,G,D]) -> [M,H,D]
ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")


@dataclass
class Readback:
    """What one module of this process really ran."""

    backend_id: str
    implementation: str
    call_count: int = 0


@dataclass
class ModelConfig:
    """The fields of config.json that the forward pass needs."""

    shape: ModelShape
    architecture: str
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    qk_norm: bool = field(init=False)

    def __post_init__(self) -> None:
        self.qk_norm = self.architecture == "Qwen3ForCausalLM"

    @classmethod
    def from_hf(cls, config: dict) -> ModelConfig:
        """Raises UserError for a model whose forward pass this is not."""
        architecture = (config.get("architectures") or ["?"])[0]
        rope_parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if architecture not in ARCHITECTURES:
            supported = " and ".join(ARCHITECTURES)
            raise UserError(f"config.json architectures={architecture!r}: only {supported} are supported; use another checkpoint")
        kind = rope_parameters.get("rope_type", rope_parameters.get("type", "default"))
        if kind != "default":
            raise UserError(f"config.json rope_type={kind!r}: only 'default' is supported; use another checkpoint")
        for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
            if config.get(key):
                raise UserError(f"config.json {key}={config[key]!r}: only false is supported; use another checkpoint")
        return cls(
            shape=ModelShape.from_hf(config),
            architecture=architecture,
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=float(config.get("rope_theta") or rope_parameters.get("rope_theta") or 10000.0),
            max_positions=config["max_position_embeddings"],
            tied=config.get("tie_word_embeddings", False),
        )


class Weight(nn.Module):
    """A parameter under the name that Hugging Face gives it."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))


class Norm(Weight):
    def __init__(self, size: int, par: Parallel, eps: float):
        super().__init__(size)
        self.par, self.eps = par, eps

    def forward(self, x: Tensor, tiles: Tensor) -> Tensor:
        return norm(self.par, x, self.weight, self.eps, tiles)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, par: Parallel, layer: int, ops: Ops, readback: Readback):
        super().__init__()
        s, tp = config.shape, par.mesh.shape.tp
        self.par, self.layer, self.ops, self.readback = par, layer, ops, readback
        self.head_dim, self.scale = s.head_dim, s.head_dim**-0.5
        q, kv = s.num_heads // tp * s.head_dim, s.num_kv_heads // tp * s.head_dim
        self.q_proj, self.k_proj, self.v_proj = Weight(q, s.hidden), Weight(kv, s.hidden), Weight(kv, s.hidden)
        self.o_proj = Weight(s.hidden, q)
        self.q_norm = Norm(s.head_dim, par, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = Norm(s.head_dim, par, config.rms_norm_eps) if config.qk_norm else None
        self.joined: Tensor | None = None  # q, k and v as one weight (see CausalLM.join_projections)

    def forward(self, x: Tensor, positions: Tensor, tiles: Tensor, tables: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        par = self.par
        self.readback.call_count += 1
        weights = self.q_proj.weight, self.k_proj.weight, self.v_proj.weight
        if self.joined is None:
            q, k, v = self.ops.column(x, weights, (par.heads, par.kv_heads, par.kv_heads), tiles)
        else:
            q, k, v = self.ops.column(x, (self.joined,), (), tiles)[0].split([len(w) for w in weights], 1)
        q, k, v = (y.unflatten(1, (y.shape[1] // self.head_dim, self.head_dim)) for y in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, tiles), self.k_norm(k, tiles)
        o = attend(self, rotate(q, positions, *tables), rotate(k, positions, *tables), v)
        return self.ops.row(o.flatten(1), self.o_proj.weight, par.heads, tiles)


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig, par: Parallel, ops: Ops, readback: Readback):
        super().__init__()
        self.par, self.ops, self.readback = par, ops, readback
        width = par.ffn.widths[par.mesh.t]
        self.gate_proj, self.up_proj = Weight(width, config.shape.hidden), Weight(width, config.shape.hidden)
        self.down_proj = Weight(config.shape.hidden, width)
        self.joined: Tensor | None = None  # gate and up

    def forward(self, x: Tensor, tiles: Tensor) -> Tensor:
        self.readback.call_count += 1
        if self.joined is None:
            gate, up = self.ops.column(x, (self.gate_proj.weight, self.up_proj.weight), (self.par.ffn, self.par.ffn), tiles)
        else:
            gate, up = self.ops.column(x, (self.joined,), (), tiles)[0].chunk(2, 1)
        return self.ops.row(self.ops.swiglu(gate, up), self.down_proj.weight, self.par.ffn, tiles)


def _joined(*weights: nn.Parameter) -> Tensor:
    """The weights under each other, [sum N_i, K]; they become views of it, so memory is held once."""
    joined = torch.cat([w.detach() for w in weights])
    for weight, part in zip(weights, joined.split([len(w) for w in weights])):
        weight.data = part
    return joined


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, par: Parallel, layer: int, ops: dict[str, Ops], readbacks: dict[str, Readback]):
        super().__init__()
        self.input_layernorm = Norm(config.shape.hidden, par, config.rms_norm_eps)
        self.self_attn = Attention(config, par, layer, ops["attention"], readbacks["attention"])
        self.post_attention_layernorm = Norm(config.shape.hidden, par, config.rms_norm_eps)
        self.mlp = FeedForward(config, par, ops["ffn"], readbacks["ffn"])

    def forward(self, x: Tensor, positions: Tensor, tiles: Tensor, tables: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x, tiles), positions, tiles, tables, attend)
        return x + self.mlp(self.post_attention_layernorm(x, tiles), tiles)


class Embedding(Weight):
    def __init__(self, rows: int, hidden: int, par: Parallel):
        super().__init__(rows, hidden)
        self.par = par

    def forward(self, ids: Tensor) -> Tensor:
        return embed(self.par, ids, self.weight)


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, par: Parallel, vocab_rows: int, ops: dict[str, Ops], readbacks: dict[str, Readback]):
        super().__init__()
        self.embed_tokens = Embedding(vocab_rows, config.shape.hidden, par)
        self.layers = nn.ModuleList(DecoderLayer(config, par, i, ops, readbacks) for i in range(config.shape.num_layers))
        self.norm = Norm(config.shape.hidden, par, config.rms_norm_eps)
        self.tables = rope.tables(config.shape.head_dim, config.max_positions, config.rope_theta)

    def forward(self, ids: Tensor, positions: Tensor, tiles: Tensor, attend: Attend) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, positions, tiles, self.tables, attend)
        return self.norm(x, tiles)


class Head(nn.Module):
    """The language-model head; a tied one holds the embedding's own parameter."""

    def __init__(self, weight: nn.Parameter, ops: Ops, readback: Readback):
        super().__init__()
        self.weight, self.ops, self.readback = weight, ops, readback

    def forward(self, h: Tensor, batch: TokenBatch, inv_temp: float) -> tuple[Tensor, Tensor]:
        self.readback.call_count += 1
        return self.ops.logprob(h, self.weight, batch, inv_temp)

    def logits(self, h: Tensor) -> Tensor:
        self.readback.call_count += 1
        return self.ops.logits(h, self.weight)


class CausalLM(nn.Module):
    """`implementations` names the kernels of each module: {"attention": "lockstep" | "torch", "ffn": ..., "logp": ...}."""

    def __init__(self, config: ModelConfig, par: Parallel, implementations: dict[str, str]):
        super().__init__()
        ops: dict[str, Ops] = {m: LockstepOps(par) if i == "lockstep" else TorchOps(par) for m, i in implementations.items()}
        self.config, self.par = config, par
        self.readbacks = {m: Readback(BACKEND_IDS[m, i], i) for m, i in implementations.items()}
        rows = par.vocab.widths[par.mesh.t]
        self.model = Decoder(config, par, rows, ops, self.readbacks)
        head = self.model.embed_tokens.weight if config.tied else nn.Parameter(torch.empty(rows, config.shape.hidden))
        self.lm_head = Head(head, ops["logp"], self.readbacks["logp"])
        for name, parameter in self.named_parameters():
            parameter.tensor_name = name  # type: ignore[attr-defined]  # where the autograd functions find its gradient buffer

    def reset_counts(self) -> None:
        for readback in self.readbacks.values():
            readback.call_count = 0

    def join_projections(self) -> None:
        """For inference: linears of one input become one linear. An output is a function of its own row of the weight, so no bit changes.

        The parameters stay, as views, and may be loaded again in place; moving the model to another device or dtype has to come first.
        """
        for module in self.modules():
            if isinstance(module, Attention) and isinstance(module.ops, LockstepOps):
                module.joined = _joined(module.q_proj.weight, module.k_proj.weight, module.v_proj.weight)
            elif isinstance(module, FeedForward) and isinstance(module.ops, LockstepOps):
                module.joined = _joined(module.gate_proj.weight, module.up_proj.weight)

    def forward(self, batch: TokenBatch, inv_temp: float) -> tuple[Tensor, Tensor]:
        """Logprobs [H] and entropies [H] of the batch's response tokens."""

        def attend(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return module.ops.attention(q, k, v, batch, module.scale)

        h = self.model(batch.token_ids, batch.positions, batch.tiles, attend)
        return self.lm_head(h[batch.head_rows], batch, inv_temp)


def implementations(kernels: Kernels, side: str) -> dict[str, str]:
    """Kernels of each module on one side: "training" or "rollout"."""
    return {module: expected_implementation(kernels.of(module), side) for module in MODULES}


def inverse_temperature(temperature: float) -> float:
    """1 / T; greedy decoding (T = 0) reports the logprobs of T = 1."""
    return 1.0 / temperature if temperature else 1.0

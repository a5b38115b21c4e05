"""Pure arithmetic of layouts: which rank sits where on the mesh, and who owns which head, leaf, token tile and sample.

Axis order of the mesh: tp fastest, then cp, then dp: rank = t + tp * (c + cp * d).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MeshShape:
    tp: int = 1
    cp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(tp, cp, dp) coordinates of a rank."""
        return rank % self.tp, rank // self.tp % self.cp, rank // (self.tp * self.cp)

    def rank(self, t: int, c: int, d: int) -> int:
        return t + self.tp * (c + self.cp * d)

    def tp_groups(self) -> list[list[int]]:
        return [[self.rank(t, c, d) for t in range(self.tp)] for d in range(self.dp) for c in range(self.cp)]

    def cp_groups(self) -> list[list[int]]:
        return [[self.rank(t, c, d) for c in range(self.cp)] for d in range(self.dp) for t in range(self.tp)]

    def gradient_groups(self) -> list[list[int]]:
        """Ranks that hold the same parameter slice: cp x dp."""
        return [[self.rank(t, c, d) for d in range(self.dp) for c in range(self.cp)] for t in range(self.tp)]


def stage_mesh(layout: Any, stage: str) -> MeshShape:
    """Sampling has a layout of its own; what it leaves open is as in training."""
    if stage == "rollout":
        rollout = layout.rollout
        return MeshShape(tp=rollout.tp or layout.tp, cp=rollout.cp, dp=rollout.dp or layout.dp)
    return MeshShape(layout.tp, layout.cp, layout.dp)


def split_evenly(n: int, parts: int, index: int) -> tuple[int, int]:
    """Range [a, b) of part `index` when n items are cut into contiguous parts whose sizes differ by at most one."""
    return n * index // parts, n * (index + 1) // parts


def split_leaves(size: int, leaf: int, parts: int, index: int) -> tuple[int, int]:
    """Range [a, b) in elements: an axis of `size`, cut only at multiples of `leaf`."""
    a, b = split_evenly(num_leaves(size, leaf), parts, index)
    return min(a * leaf, size), min(b * leaf, size)


def num_leaves(size: int, leaf: int) -> int:
    return -(-size // leaf)


def tile_owner(tile: int, cp: int) -> int:
    """Context-parallel rank of a token tile: back and forth (0 1 .. P-1 P-1 .. 1 0), so causal work is balanced."""
    i = tile % (2 * cp)
    return i if i < cp else 2 * cp - 1 - i


def owned_positions(length: int, token_leaf: int, cp: int, c: int) -> list[tuple[int, int]]:
    """Absolute position ranges [a, b), one per token tile, that context-parallel rank c owns of a sample."""
    tiles = range(num_leaves(length, token_leaf))
    return [(i * token_leaf, min((i + 1) * token_leaf, length)) for i in tiles if tile_owner(i, cp) == c]


def owned_samples(num_samples: int, dp: int, d: int) -> range:
    """Samples of data-parallel rank d: contiguous, sizes differ by at most one."""
    return range(*split_evenly(num_samples, dp, d))


def micro_batches(samples: range, micro_batch: int, num_samples: int, dp: int) -> list[list[int]]:
    """The rank's samples cut in micro-batches; padded with empty ones, so that every rank runs the same number of forwards."""
    size = micro_batch or max(1, -(-num_samples // dp))
    own = [list(samples[i : i + size]) for i in range(0, len(samples), size)]
    most = max(-(-len(owned_samples(num_samples, dp, d)) // size) for d in range(dp))
    return own + [[]] * (most - len(own))


# --- tensor-parallel slices of parameters, by Hugging Face name ---------------------------------------------------------------
@dataclass(frozen=True)
class ModelShape:
    """What layouts need to know of a model (from config.json)."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def from_hf(cls, config: dict) -> ModelShape:
        heads = config["num_attention_heads"]
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
        )


def shard(name: str, shape: ModelShape, k_leaf: int, vocab_leaf: int, tp: int, t: int) -> tuple[int, int, int] | None:
    """(dim, start, stop) of rank t's slice of the parameter `name`, or None when the parameter is replicated."""
    parts = name.split(".")
    module = parts[-2] if len(parts) > 1 else ""
    d = shape.head_dim
    match module:
        case "q_proj":
            a, b = split_evenly(shape.num_heads, tp, t)
            return 0, a * d, b * d
        case "k_proj" | "v_proj":
            a, b = split_evenly(shape.num_kv_heads, tp, t)
            return 0, a * d, b * d
        case "o_proj":
            a, b = split_evenly(shape.num_heads, tp, t)
            return 1, a * d, b * d
        case "gate_proj" | "up_proj":
            return 0, *split_leaves(shape.intermediate, k_leaf, tp, t)
        case "down_proj":
            return 1, *split_leaves(shape.intermediate, k_leaf, tp, t)
        case "embed_tokens" | "lm_head":
            return 0, *split_leaves(shape.vocab, vocab_leaf, tp, t)
        case _:
            return None


def layout_name(tp: int, cp: int, dp: int, zero: int = 0) -> str:
    """tp2cp4, dp2z3, tp1cp1dp1 (the oracle): axes of degree one are left out, unless all are."""
    axes = [f"{axis}{n}" for axis, n in (("tp", tp), ("cp", cp), ("dp", dp)) if n > 1]
    return ("".join(axes) or "tp1cp1dp1") + (f"z{zero}" if zero else "")

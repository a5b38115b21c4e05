"""The models whose shapes are timed, and random tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    k_leaf: int  # leaves as in the model's experiment preset
    vocab_leaf: int
    kv_leaf: int
    token_leaf: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(out-features N, in-features K) of each kind of weight."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (q, self.hidden),
            "k_proj": (kv, self.hidden),
            "o_proj": (self.hidden, q),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }


QWEN3_06B = Shape("Qwen3-0.6B", 1024, 3072, 16, 8, 128, 151936, 128, 4748, 128, 64)
QWEN3_8B = Shape("Qwen3-8B", 4096, 12288, 32, 8, 128, 151936, 512, 4748, 128, 64)
SMOLLM2 = Shape("SmolLM2-135M", 576, 1536, 9, 3, 64, 49152, 128, 1024, 64, 16)
TINY = Shape("tiny", 96, 192, 24, 12, 8, 320, 16, 32, 16, 8)


def models(device: str) -> list[Shape]:
    return [QWEN3_06B, SMOLLM2, TINY] if device == "cpu" else [QWEN3_06B, QWEN3_8B]


def dtypes(device: str) -> list[torch.dtype]:
    return [torch.float32] if device == "cpu" else [torch.bfloat16, torch.float32]


def randn(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)

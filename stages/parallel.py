"""What a module needs to know to compute its share: the mesh, the leaves of each sharded axis, and where gradients go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import reduce
from pipeline.layout import ModelShape, num_leaves, split_evenly

if TYPE_CHECKING:
    from pipeline.config import Numerics
    from stages.exact_gradients import ExactGradients
    from stages.mesh import Mesh


@dataclass(frozen=True)
class Axis:
    """An axis cut in leaves; every tensor-parallel rank holds a contiguous range of them."""

    size: int  # elements
    leaf: int  # elements per leaf
    count: int  # leaves of the whole axis
    ranges: tuple[tuple[int, int], ...]  # leaves [a, b) of each tensor-parallel rank

    @classmethod
    def of(cls, size: int, leaf: int, tp: int) -> Axis:
        count = num_leaves(size, leaf)
        return cls(size, leaf, count, tuple(split_evenly(count, tp, t) for t in range(tp)))

    @property
    def widths(self) -> list[int]:
        """Elements of each rank's slice."""
        return [min(b * self.leaf, self.size) - min(a * self.leaf, self.size) for a, b in self.ranges]

    @property
    def nodes(self) -> list[list[tuple[int, int]]]:
        """Maximal tree nodes of each rank."""
        return [reduce.nodes(self.count, a, b) for a, b in self.ranges]


@dataclass
class Parallel:
    """One rank's context. `grads` is None where nothing is trained."""

    mesh: Mesh
    shape: ModelShape
    numerics: Numerics
    grads: ExactGradients | None = None
    heads: Axis = field(init=False)  # leaves of head_dim: a leaf is a head
    kv_heads: Axis = field(init=False)
    ffn: Axis = field(init=False)
    vocab: Axis = field(init=False)

    def __post_init__(self) -> None:
        tp, s = self.mesh.shape.tp, self.shape
        self.heads = Axis.of(s.num_heads * s.head_dim, s.head_dim, tp)
        self.kv_heads = Axis.of(s.num_kv_heads * s.head_dim, s.head_dim, tp)
        self.ffn = Axis.of(s.intermediate, self.numerics.k_leaf, tp)
        self.vocab = Axis.of(s.vocab, self.numerics.vocab_leaf, tp)

    @property
    def dtype(self) -> torch.dtype:
        """Storage of weights and activations."""
        return torch.bfloat16 if self.numerics.precision == "bf16" else torch.float32

    def stored(self, weight: Tensor) -> Tensor:
        """The weight as it is computed with: itself, or an fp32 master rounded to nearest even once."""
        return weight.detach().to(self.dtype)

    @property
    def first_token_id(self) -> int:
        """First vocabulary id of this rank's slice of the embedding and the head."""
        return self.vocab.ranges[self.mesh.t][0] * self.vocab.leaf

    @contextlib.contextmanager
    def accumulator(self, weight: Tensor) -> Iterator[Tensor]:
        """The int64 accumulator of a parameter; an overflow inside the block gets the parameter's name."""
        if self.grads is None:
            raise RuntimeError("this model is not trained: it has no gradient accumulators")
        name: str = weight.tensor_name  # type: ignore[attr-defined]  # set by CausalLM
        with self.grads.naming(name):
            yield self.grads.buffer(name)

    def placeholder(self, weight: Tensor) -> Tensor | None:
        """What an autograd function returns for the weight's gradient, which goes to the accumulator instead."""
        return self.grads.placeholder(weight) if self.grads else None

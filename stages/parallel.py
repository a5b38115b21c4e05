"""What a module needs to know to compute its share: the mesh, the leaves of each sharded axis, and where gradients go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.layout import ModelShape, num_leaves, split_evenly, tree_nodes

if TYPE_CHECKING:
    from pipeline.config import Numerics
    from stages.exact_gradients import ExactGradients
    from stages.mesh import Mesh


@dataclass(frozen=True)
class Axis:
    """An axis cut in leaves; every tensor-parallel rank holds a contiguous range of them."""

    leaf: int  # elements per leaf
    count: int  # leaves of the whole axis
    ranges: tuple[tuple[int, int], ...]  # leaves [a, b) of each tensor-parallel rank

    @classmethod
    def of(cls, size: int, leaf: int, tp: int) -> Axis:
        count = num_leaves(size, leaf)
        return cls(leaf, count, tuple(split_evenly(count, tp, t) for t in range(tp)))

    @property
    def nodes(self) -> list[list[tuple[int, int]]]:
        """Maximal tree nodes of each rank."""
        return [tree_nodes(self.count, a, b) for a, b in self.ranges]


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
    def first_token_id(self) -> int:
        """First vocabulary id of this rank's slice of the embedding and the head."""
        return self.vocab.ranges[self.mesh.t][0] * self.vocab.leaf

    @property
    def vocab_widths(self) -> list[int]:
        """Rows of the embedding and the head on each tensor-parallel rank."""
        axis, size = self.vocab, self.shape.vocab
        return [min(b * axis.leaf, size) - min(a * axis.leaf, size) for a, b in axis.ranges]

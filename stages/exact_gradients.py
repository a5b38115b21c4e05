"""Weight gradients as exact integers: one int64 accumulator per parameter, whatever the order and placement of the tokens.

acc += round_half_even(g * 2^scale) per token leaf; ranks add their accumulators as integers; one division and one rounding at the end.
So micro-batching, context and data parallelism and ZeRO stages cannot move a bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from kernels import collectives, reduce


class ExactGradients:
    """The accumulators of one rank, by parameter name; each holds the rank's tensor-parallel slice.

    Memory: 8 bytes an element from the first `buffer(name)` of a step until `finish(name)`.
    """

    def __init__(
        self,
        named_shapes: Mapping[str, torch.Size | tuple[int, ...]],
        scale_log2: int,
        autograd_placeholder: bool = False,
        device: torch.device | str = "cpu",
    ):
        self.shapes = {name: torch.Size(shape) for name, shape in named_shapes.items()}
        self.scale_log2 = scale_log2
        self.autograd_placeholder = autograd_placeholder
        self.device = torch.device(device)
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str) -> Tensor:
        """int64 accumulator in units of 2^-scale_log2, zero at the first call of a step. KeyError for an unknown name."""
        if name not in self._buffers:
            self._buffers[name] = torch.zeros(self.shapes[name], dtype=torch.int64, device=self.device)
        return self._buffers[name]

    def touched(self, name: str) -> bool:
        """Whether this rank has asked for the accumulator since the last `zero` or `finish`."""
        return name in self._buffers

    def zero(self) -> None:
        """Forgets every accumulator (an abandoned step)."""
        self._buffers.clear()

    @contextlib.contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Adds the parameter's name to a kernel's OverflowError, which knows only numbers."""
        try:
            yield
        except OverflowError as error:
            raise OverflowError(
                f"gradient of {name}: {error} (numerics.grad_scale_log2={self.scale_log2}: choose a smaller one)"
            ) from error

    def placeholder(self, weight: Tensor) -> Tensor | None:
        """What an autograd function returns in place of the weight's gradient: nothing, as no ZeRO stage of the pinned DeepSpeed needs one.

        With `autograd_placeholder` a zero of the weight's shape that occupies one element.
        """
        return weight.new_zeros(()).expand(weight.shape) if self.autograd_placeholder else None

    def all_reduce(self, group: collectives.Group, names: Iterable[str] | None = None) -> None:
        """Integer SUM over the group, in place, of `names` (default: all). An untouched accumulator counts as zero.

        OverflowError with the tensor's name, on every rank, when a sum could leave 62 bits.
        """
        chosen = list(self.shapes if names is None else names)
        collectives.exact_all_reduce([self.buffer(name) for name in chosen], group, names=chosen)

    def finish(self, name: str, divisor: float) -> Tensor:
        """fp32 gradient acc / (2^scale * divisor), rounded once; the accumulator is given back."""
        with self.naming(name):
            return reduce.from_fixed(self._buffers.pop(name), self.scale_log2, divisor)

"""The decode step as CUDA graphs: recorded once per batch size, replayed for every token after the first.

A recorded step reads its inputs from fixed buffers. A batch is padded to the next recorded size; the rows of padding belong to a sequence
of one key in a spare cache row, and no row's bits depend on another row, so padding changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Step = Callable[[dict[str, Tensor]], tuple[Tensor, ...]]  # inputs by name, first dim = sequences -> outputs, first dim = sequences
Replay = Callable[[], None]


def record_cuda(step: Callable[[], None]) -> Replay:
    """Runs `step` once on a side stream (so that kernels are compiled and memory is reserved), records it, returns the replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class DecodeGraphs:
    """`step` recorded for each of `sizes`. `padding`: the input row (by name) of a sequence that isn't there.

    `record(function)` runs the function at least once and returns what repeats it; the default records a CUDA graph.
    """

    def __init__(
        self, step: Step, sizes: Sequence[int], padding: dict[str, Tensor], record: Callable[[Callable[[], None]], Replay] = record_cuda
    ):
        self.sizes, self.padding = sorted(sizes), padding
        self.replays = 0
        self._graphs: dict[int, tuple[dict[str, Tensor], list[tuple[Tensor, ...]], Replay]] = {}
        for size in reversed(self.sizes):  # the largest first: smaller ones reuse its memory
            self._graphs[size] = self._recorded(step, size, record)

    def _recorded(self, step: Step, size: int, record: Callable[[Callable[[], None]], Replay]):
        buffers = {name: row.unsqueeze(0).repeat(size, *[1] * row.dim()) for name, row in self.padding.items()}
        outputs: list[tuple[Tensor, ...]] = []

        def run() -> None:
            outputs[:] = [step(buffers)]

        return buffers, outputs, record(run)

    def __call__(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Outputs of the step for n sequences; valid until the next call. ValueError when n is above the largest recorded size."""
        count = len(next(iter(inputs.values())))
        size = next((s for s in self.sizes if s >= count), None)
        if size is None:
            raise ValueError(f"{count} sequences: graphs were recorded for at most {self.sizes[-1]}")
        buffers, outputs, replay = self._graphs[size]
        for name, buffer in buffers.items():
            buffer[:count].copy_(inputs[name], non_blocking=True)
            buffer[count:].copy_(self.padding[name])
        replay()
        self.replays += 1
        return tuple(x[:count] for x in outputs[0])

    def describe(self) -> dict[str, Any]:
        """What a validation asks for: the mode, the sizes, and how often they ran."""
        return {"graph_mode": "cuda_graph", "capture_sizes": self.sizes, "graph_replays": self.replays}

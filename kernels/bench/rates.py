"""What this machine can do at most: the floor under every time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.bench.timing import Clock


@dataclass(frozen=True)
class Rates:
    """flops: multiply-adds count twice, per second, by the largest product PyTorch is given here; bytes: per second, of a large copy."""

    flops: float
    bytes: float

    def floor(self, flops: float, num_bytes: float) -> float:
        """Seconds below which the work can't be done."""
        return max(flops / self.flops, num_bytes / self.bytes)


def measure(clock: Clock, dtype: torch.dtype, rounds: int = 3) -> Rates:
    size, numel = (2048, 1 << 25) if clock.device == "cpu" else (8192, 1 << 29)
    a, b = (torch.ones(size, size, device=clock.device, dtype=dtype) for _ in range(2))
    source = torch.ones(numel, device=clock.device)
    target = torch.empty_like(source)
    product = min(clock.seconds(lambda: a @ b, 1) for _ in range(rounds))
    copy = min(clock.seconds(lambda: target.copy_(source), 1) for _ in range(rounds))
    return Rates(2 * size**3 / product, 2 * 4 * numel / copy)

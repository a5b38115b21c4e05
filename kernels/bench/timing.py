"""Interleaved timing: each round runs both sides back to back, so what disturbs the machine disturbs both."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from kernels.cpu import build

Thunk = Callable[[], object]
PAUSE = 0.02  # seconds


@dataclass(frozen=True)
class Case:
    """The same work twice. target: largest ratio ours / theirs that is good enough; a GPU's target is given as 1 / share."""

    op: str  # "linear forward"
    shape: str  # model
    detail: str  # "q_proj M=16"
    ours: Thunk
    theirs: Thunk
    target: float
    flops: float = 0.0  # of the work, whoever does it
    bytes: float = 0.0  # that must move at least once
    heavy: bool = False  # seconds per call: fewer rounds
    dtype: torch.dtype | None = None  # of the products, where a device has several rates; None: its first


@dataclass
class Row:
    """A timed case. Ratios are ours / theirs by round, seconds the best of each side."""

    case: Case
    threads: int
    ratios: list[float] = field(default_factory=list)
    ours: float = math.inf
    theirs: float = math.inf
    floor: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool:
        return self.median <= self.case.target

    def record(self) -> dict:
        c = self.case
        return {
            "op": c.op, "shape": c.shape, "detail": c.detail, "threads": self.threads, "target": c.target, "met": self.met,
            "ratio": {"min": min(self.ratios), "median": self.median, "max": max(self.ratios), "rounds": len(self.ratios)},
            "seconds": {"ours": self.ours, "theirs": self.theirs, "floor": self.floor},
        }  # fmt: skip


class Clock:
    """Seconds of repeated calls on one device."""

    def __init__(self, device: str):
        self.device = device

    def seconds(self, thunk: Thunk, repeat: int) -> float:
        """Of one call, over `repeat` calls in a row."""
        if self.device != "cpu":
            return self._on_gpu(thunk, repeat)
        started = time.perf_counter()
        for _ in range(repeat):
            thunk()
        return (time.perf_counter() - started) / repeat

    @staticmethod
    def _on_gpu(thunk: Thunk, repeat: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeat):
            thunk()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) * 1e-3 / repeat


def set_threads(threads: int) -> None:
    """Of both sides."""
    torch.set_num_threads(threads)
    build.set_threads(threads)


def time_case(case: Case, clock: Clock, threads: int, rounds: int, least: float = 2e-3) -> Row:
    """A side is repeated so often that a measurement takes about `least` seconds; rounds alternate which side goes first."""
    row = Row(case, threads)
    once = [clock.seconds(side, 1) for side in (case.ours, case.theirs) for _ in range(2)]  # also the warm-up
    repeat = max(1, min(1000, math.ceil(least / max(min(once), 1e-9))))
    for i in range(min(rounds, 3) if case.heavy else rounds):
        sides = (case.ours, case.theirs) if i % 2 == 0 else (case.theirs, case.ours)
        seconds = []
        for side in sides:
            if threads > 1:  # idle workers of the other side's pool spin for a while: they are not to be timed as ours
                time.sleep(PAUSE)
            seconds.append(clock.seconds(side, repeat))
        first, second = seconds
        ours, theirs = (first, second) if i % 2 == 0 else (second, first)
        row.ratios.append(ours / theirs)
        row.ours, row.theirs = min(row.ours, ours), min(row.theirs, theirs)
    row.case = replace(case, ours=_released, theirs=_released)
    return row


def _released() -> None:
    """In the place of a side that was timed: its tensors, a gigabyte for a large head, are not kept for the table."""


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan

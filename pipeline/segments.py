"""Whether a run's iterations are stages of their own, or segments: many iterations in one set of processes (stages/segment.py)."""

from __future__ import annotations

from typing import Any

from pipeline.layout import stage_mesh

LONG = 30  # iterations from which a stage for each of them costs more than it gives
DEFAULT_SEGMENT = 25


def segment_length(cfg: Any) -> int:
    """Iterations that one set of processes covers; 1 = rollout, ref_logprob and train are stages of DVC for each iteration."""
    if cfg.launch.segment:
        return min(cfg.launch.segment, cfg.iterations)
    return DEFAULT_SEGMENT if cfg.iterations >= LONG and fits(cfg.layout) else 1


def fits(layout: Any) -> bool:
    """In a segment the rollout runs in the training's processes."""
    return stage_mesh(layout, "rollout").world_size <= stage_mesh(layout, "train").world_size


def segments(cfg: Any) -> list[range]:
    """The iterations (from 1) of each segment."""
    length = segment_length(cfg)
    return [range(first, min(first + length, cfg.iterations + 1)) for first in range(1, cfg.iterations + 1, length)]

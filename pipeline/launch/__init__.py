"""Runs a function on several ranks: forked from a server that has torch and deepspeed loaded, or by torchrun or deepspeed.

    result = run_job("stages.train:rank_main", args, world_size=4, launch_cfg=cfg.launch, log_path=Path("logs/train.log"))

The function is called in every rank as fn(args), with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, LOCAL_SIZE, MASTER_ADDR, MASTER_PORT,
OMP_NUM_THREADS, LOCKSTEP_THREADS and LOCKSTEP_KERNEL_BUILD set. Its dict on rank 0 (JSON values) is the result. Only the standard library
is imported here: a stage asks for its ranks within a tenth of a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.launch.client import Job, run_forked
from pipeline.launch.failures import LaunchError, RankFailed
from pipeline.launch.processes import guard_process
from pipeline.launch.torchrun import run_launched

__all__ = ["LaunchError", "RankFailed", "guard_process", "run_job"]


def run_job(
    function: str, args: dict[str, Any], world_size: int, launch_cfg: Any, log_path: Path | None = None, cwd: Path | None = None
) -> dict[str, Any]:
    """Runs `function` ("module:name") on `world_size` ranks and returns rank 0's result. No rank is alive when it returns or raises.

    launch_cfg: the `Launch` section. log_path: rank r > 0 prints to <stem>.rank0000r.log beside it; rank 0 prints to this process' own
    stdout and stderr. cwd: of the ranks, default the project root.
    Raises RankFailed (a rank raised, was killed or took too long), UserError (a rank raised one), LaunchError (the launcher itself).
    """
    if world_size < 1:
        raise UserError(f"world_size={world_size} must be 1 or more")
    job = Job.make(function, args, world_size, launch_cfg, log_path, cwd)
    match launch_cfg.launcher:
        case "fork":
            return run_forked(job)
        case "torchrun" | "deepspeed":
            return run_launched(job, launch_cfg)
        case other:
            raise UserError(f"launch.launcher={other} is unknown: use fork, torchrun or deepspeed")

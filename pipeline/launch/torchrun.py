"""Ranks started by torchrun or by the deepspeed launcher: for GPUs and for several nodes, behind the same interface as the fork server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.errors import MissingPrerequisite, UserError
from pipeline.launch.address import PROJECT_ROOT
from pipeline.launch.client import Job
from pipeline.launch.failures import LaunchError, failure, raise_failure
from pipeline.launch.processes import die_with_parent, starter, this_process
from pipeline.launch.ranks import reserve_port, thread_environment

_ENTRY = "pipeline.launch.rank_entry"
_END_SECONDS = 10.0
_WATCH_SECONDS = 0.5


def run_launched(job: Job, launch_cfg: Any) -> dict[str, Any]:
    """Runs the job under launch.launcher.

    With launch.nodes > 1 and torchrun the same command runs on every node, with launch.rendezvous=host:port; a node without rank 0 gets
    its first rank's own result. With deepspeed one command starts all nodes of launch.hostfile, and the project folder is shared by them.
    """
    shared = PROJECT_ROOT / "logs" if launch_cfg.launcher == "deepspeed" and launch_cfg.hostfile else None
    if shared:
        shared.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-job-", dir=shared) as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({**asdict(job), "client": asdict(this_process()), "host": socket.gethostname()}))
        if launch_cfg.launcher == "torchrun":
            status = _run(_torchrun_command(job, launch_cfg, folder), job, nullcontext())
        else:
            holder, port = reserve_port()
            status = _run(_deepspeed_command(job, launch_cfg, folder, port), job, holder)
        outcomes = [json.loads(path.read_text()) for path in folder.glob("outcome.*.json")]
    return _result(job, outcomes, status)


def _torchrun_command(job: Job, launch_cfg: Any, folder: Path) -> list[str]:
    nodes = launch_cfg.nodes if job.world_size > 1 else 1  # a stage without ranks runs where it is
    if job.world_size % nodes:
        raise UserError(f"launch.nodes={nodes} does not divide the {job.world_size} ranks: choose a layout whose ranks it divides")
    if nodes == 1:
        place = ["--standalone"]  # the rendezvous and its port are torchrun's own
    elif launch_cfg.rendezvous:
        place = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={launch_cfg.rendezvous}", f"--rdzv-id={job.function}"]
    else:
        raise UserError(f"launch.nodes={nodes} needs launch.rendezvous=host:port, the same on every node")
    command = [sys.executable, "-m", "torch.distributed.run", *place, f"--nproc-per-node={job.world_size // nodes}", "--max-restarts=0"]
    return [*command, "-m", _ENTRY, str(folder / "job.json")]


def _deepspeed_command(job: Job, launch_cfg: Any, folder: Path, port: int) -> list[str]:
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank", f"--master_port={port}"]
    if launch_cfg.hostfile and job.world_size > 1:
        if not Path(launch_cfg.hostfile).is_file():
            raise MissingPrerequisite(f"launch.hostfile={launch_cfg.hostfile} is not a file: write one line `host slots=N` per node")
        command += [f"--hostfile={launch_cfg.hostfile}"]
    else:
        command += ["--hostfile=/dev/null", "--master_addr=127.0.0.1", f"--num_gpus={job.world_size}"]
    return [*command, "--module", _ENTRY, str(folder / "job.json")]


def _run(command: list[str], job: Job, while_open: Any) -> int | None:
    """Exit status of the launcher, None when it took too long. SIGTERM makes it end its ranks; they die with it in any case."""
    environment = {**os.environ, **thread_environment(os.environ, job.threads, job.kernel_build)}
    parent_pid = os.getpid()
    with while_open:
        launcher = subprocess.Popen(
            command, cwd=PROJECT_ROOT, env=environment, preexec_fn=lambda: die_with_parent(parent_pid, signal.SIGTERM)
        )
        try:
            return _wait(launcher, job.timeout_seconds)
        finally:
            launcher.terminate()
            try:
                launcher.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def _wait(launcher: subprocess.Popen, seconds: float) -> int | None:
    watched, deadline = starter(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            return launcher.wait(_WATCH_SECONDS)
        except subprocess.TimeoutExpired:
            if not watched.alive():
                raise LaunchError(f"process {watched.pid}, for which this job ran, has ended") from None
    return None


def _result(job: Job, outcomes: list[dict[str, Any]], status: int | None) -> dict[str, Any]:
    outcomes.sort(key=lambda outcome: (outcome["time"], outcome["rank"]))
    failures = [outcome for outcome in outcomes if "status" in outcome]
    if status is None:
        failures.append(failure(0, "time limit", message=f"not done after launch.timeout_seconds={job.timeout_seconds:g}"))
    if failures:
        raise_failure(failures, job.world_size)
    done = sorted((outcome for outcome in outcomes if "result" in outcome), key=lambda outcome: outcome["rank"])
    if status or not done:
        raise LaunchError(f"the launcher ended with exit status {status}, and no rank of this node says why: see its output above")
    return done[0]["result"]

"""Functions that the tests of the launcher run as ranks, and a client: `python -m launch_jobs REQUEST` prints the result as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from pipeline.errors import MissingPrerequisite, UserError
from pipeline.launch import LaunchError, RankFailed, guard_process, run_job
from pipeline.launch.processes import is_open

LAUNCH = {"launcher": "fork", "threads": 1, "kernel_build": "auto", "idle_seconds": 5, "timeout_seconds": 60}
LAUNCH |= {"nodes": 1, "rendezvous": None, "hostfile": None}


def _rank() -> int:
    return int(os.environ["RANK"])


def _leave_pid(args: dict) -> None:
    path, partial = Path(args["folder"], f"pid.{_rank()}"), Path(args["folder"], f"partial.{_rank()}")
    partial.write_text(str(os.getpid()))
    partial.rename(path)


def report(args: dict) -> dict:
    print(f"out of rank {_rank()}")
    print(f"err of rank {_rank()}", file=sys.stderr)
    return {
        "args": args,
        "server": os.getppid(),
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "terminal": sys.stderr.isatty(),
        "fds": [fd for fd in map(int, os.listdir("/proc/self/fd")) if is_open(fd)],
        "server_threads": len(os.listdir(f"/proc/{os.getppid()}/task")),
        "modules": sorted(sys.modules),
    }


def misbehave(args: dict) -> dict:
    """Rank `args["rank"]` does `args["how"]`, the others wait for ever."""
    _leave_pid(args)
    if args["how"] == "be noticed" and _rank() != args["rank"]:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
    if _rank() != args["rank"]:
        threading.Event().wait()
    while any(not Path(args["folder"], f"pid.{rank}").exists() for rank in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)
    print("last words")
    match args["how"]:
        case "raise":
            raise ValueError("no good")
        case "be noticed":  # the report of the other ranks arrives before our end does
            time.sleep(0.1)
            os._exit(3)
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "user error":
            raise MissingPrerequisite("data.path=x.jsonl is not a file: write it")
        case "result":
            return {"not JSON": object()}
        case "wait":
            threading.Event().wait()
    return {}


def reduce(args: dict) -> dict:
    """Sum over ranks; with args["dies"] that rank ends in the middle of it."""
    import torch
    import torch.distributed as dist

    start = time.time()
    dist.init_process_group("gloo")
    dist.barrier()
    ready = time.time() - start
    if _rank() == args.get("dies"):
        os._exit(7)
    total = torch.tensor([_rank() + 1])
    dist.all_reduce(total)
    return {"sum": int(total), "init_seconds": ready, "server": os.getppid(), "threads": torch.get_num_threads()}


def step(args: dict) -> dict:
    """One optimizer step of DeepSpeed's ZeRO 3."""
    import deepspeed
    import torch

    start = time.time()
    deepspeed.init_distributed("gloo", verbose=False)
    model = torch.nn.Linear(64, 64)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "steps_per_print": 10**9}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)  # type: ignore[arg-type]
    engine.backward(engine(torch.ones(1, 64)).sum())
    engine.step()
    torch.distributed.barrier()
    return {"step_seconds": time.time() - start}


def main() -> int:
    """Exit 2 to 4: a UserError, told in one line. Exit 1: a rank or the launcher failed, told in full."""
    request = json.loads(sys.argv[1])
    if request.pop("guard", True):
        guard_process()
    request["launch_cfg"] = SimpleNamespace(**{**LAUNCH, **request.get("launch_cfg", {})})
    log_path = request.pop("log_path", None)
    try:
        start = time.time()
        result = run_job(log_path=Path(log_path) if log_path else None, **request)
        print(json.dumps({**result, "seconds": time.time() - start}))
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except LaunchError as error:
        status = (error.rank, error.status) if isinstance(error, RankFailed) else None
        print(f"{status}\n{error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

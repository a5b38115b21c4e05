"""What happens inside a rank: its environment, the call, and the report of how it ended. The same under every launcher."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.launch.failures import failure

# For ranks on the CPU. torch.compile is never used, and importing its machinery costs more than a small job.
CPU_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "TORCHDYNAMO_DISABLE": "1",
    "DEEPSPEED_LOG_LEVEL": "error",
    "TOKENIZERS_PARALLELISM": "false",  # its thread pool does not survive a fork
    "GLOO_SOCKET_IFNAME": "lo",
}


def rank_environment(base: Mapping[str, str], rank: int, world_size: int, port: int, threads: int, kernel_build: str) -> dict[str, str]:
    """Environment of a rank of one machine."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "LOCAL_SIZE": world_size}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {
        **base,
        **CPU_ENVIRONMENT,
        **thread_environment(base, threads, kernel_build),
        **{name: str(value) for name, value in place.items()},
    }


def thread_environment(base: Mapping[str, str], threads: int, kernel_build: str) -> dict[str, str]:
    """A build named in the configuration counts more than one named in the environment."""
    build = base.get("LOCKSTEP_KERNEL_BUILD", "auto") if kernel_build == "auto" else kernel_build
    return {"OMP_NUM_THREADS": str(threads), "LOCKSTEP_THREADS": str(threads), "LOCKSTEP_KERNEL_BUILD": build}


def reserve_port() -> tuple[socket.socket, int]:
    """A port for rank 0's store that nobody else is given while the returned socket is open.

    The socket is bound but never listens. With SO_REUSEADDR on both, the store may bind and listen on the same port; the kernel hands a
    bound port to no other `bind(0)` or `connect`, so two clones that start ranks at the same time can't meet.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder, holder.getsockname()[1]


def rank_log(log_path: Path, rank: int) -> Path:
    """File of what a rank other than 0 prints: train.log -> train.rank00001.log."""
    return log_path.with_name(f"{log_path.stem}.rank{rank:05d}.log")


def tail(path_or_fd: Path | int, limit: int = 8000) -> str:
    """The last bytes of a log as text."""
    try:
        with open(path_or_fd, "rb", closefd=False) if isinstance(path_or_fd, int) else open(path_or_fd, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - limit))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def call(rank: int, function: str, args: dict[str, Any]) -> dict[str, Any]:
    """Calls `module:name` with args. Returns {"rank", "result"} or a failure; raises nothing."""
    faulthandler.enable()  # a crash in C++ code shows where Python stood
    faulthandler.register(signal.SIGUSR1)  # sent before a rank is killed for its time limit
    # DeepSpeed calls collectives by names that torch is about to drop: nothing that a user could act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    try:
        if "torch" in sys.modules:  # imported before the fork, when OMP_NUM_THREADS was 1
            sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        module, _, name = function.partition(":")
        result = getattr(importlib.import_module(module), name)(args)
        json.dumps(result)  # a result that is not JSON is the function's fault: say so here, with its rank
        outcome = {"rank": rank, "result": result} if os.environ["LOCAL_RANK"] == "0" else {"rank": rank}
    except UserError as error:
        outcome = failure(rank, "exception", name=type(error).__name__, message=str(error), exit_code=error.exit_code)
    except BaseException as error:
        lines = traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        outcome = failure(rank, "exception", name=type(error).__name__, message=str(error), traceback="".join(lines))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader has gone; the outcome still counts
            stream.flush()
    return outcome

"""One rank under torchrun or deepspeed: `python -m pipeline.launch.rank_entry JOB.json`. Writes outcome.RANK.json beside that file.

The process that the launcher knows only waits for the rank it forks: whatever becomes of the rank, somebody is left to report it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from pipeline.launch.failures import describe_exit, failure
from pipeline.launch.processes import Process, die_with_parent
from pipeline.launch.ranks import call, rank_log, tail

_WATCH_SECONDS = 0.5
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}


def main() -> None:
    die_with_parent()
    job_path = Path(sys.argv[1])
    job = json.loads(job_path.read_text())
    rank = int(os.environ["RANK"])
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # the launchers set one of the two
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])
    outcome_path = job_path.with_name(f"outcome.{rank:05d}.json")
    log_path = rank_log(Path(job["log_path"] or job_path.with_name("rank.log")), rank)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # they are waited for in _supervise
    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(supervisor)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _run(job, rank, outcome_path, log_path)
    status = _supervise(pid, job)
    if status and not outcome_path.exists():
        _report(outcome_path, failure(rank, describe_exit(status), output=tail(log_path) if rank else ""))
    sys.exit(1 if status is None or status else 0)


def _supervise(pid: int, job: dict[str, Any]) -> int | None:
    """The wait status of the rank; None when it was ended on somebody else's account: the launcher's, or because the client has gone."""
    client = Process(**job["client"]) if job["host"] == socket.gethostname() else None
    while True:
        received = signal.sigtimedwait(_SIGNALS, _WATCH_SECONDS)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if (received and received.si_signo != signal.SIGCHLD) or (client and not client.alive()):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None


def _run(job: dict[str, Any], rank: int, outcome_path: Path, log_path: Path) -> NoReturn:
    if rank:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
    os.chdir(job["cwd"])
    outcome = call(rank, job["function"], job["args"])
    if rank and "status" in outcome:
        outcome["output"] = tail(log_path)
    _report(outcome_path, outcome)
    os._exit(1 if "status" in outcome else 0)


def _report(path: Path, outcome: dict[str, Any]) -> None:
    """Whole or not at all: the rank may be killed while it writes."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({**outcome, "time": time.time()}))
    partial.replace(path)


if __name__ == "__main__":
    main()

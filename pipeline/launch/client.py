"""Asks the fork server of this clone for ranks, and starts it when there is none."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.launch.address import PROJECT_ROOT, fingerprint, server_folder
from pipeline.launch.failures import LaunchError, raise_failure
from pipeline.launch.processes import Process, is_open, starter
from pipeline.launch.protocol import Decoder, Message, encode
from pipeline.launch.ranks import tail

_ATTEMPTS = 5  # a server may leave between our connecting and our asking


@dataclass(frozen=True)
class Job:
    """What a launcher needs to know. JSON values only."""

    function: str
    args: dict[str, Any]
    world_size: int
    threads: int
    kernel_build: str
    idle_seconds: float
    timeout_seconds: float
    log_path: str | None
    cwd: str

    @classmethod
    def make(cls, function: str, args: dict[str, Any], world_size: int, launch_cfg: Any, log_path: Path | None, cwd: Path | None) -> Job:
        return cls(
            function=function,
            args=args,
            world_size=world_size,
            threads=int(launch_cfg.threads),
            kernel_build=str(launch_cfg.kernel_build),
            idle_seconds=float(launch_cfg.idle_seconds),
            timeout_seconds=float(launch_cfg.timeout_seconds),
            log_path=os.path.abspath(log_path) if log_path else None,
            cwd=os.path.abspath(cwd or PROJECT_ROOT),
        )


def run_forked(job: Job) -> dict[str, Any]:
    """Runs the job on ranks forked by this clone's server."""
    folder, watched = server_folder(), starter()
    for _ in range(_ATTEMPTS):
        code = fingerprint(os.environ)
        request = {**asdict(job), "fingerprint": code, "environment": dict(os.environ), "starter": [watched.pid, watched.start_time]}
        with _connect(folder, code, watched, job.idle_seconds) as connection:
            answer = _ask(connection, request, folder)
        if answer is not None:
            if answer["kind"] == "failed":
                raise_failure(answer["failures"], job.world_size)
            return answer["result"]
    raise LaunchError(f"the fork server ended before it took the job:\n{tail(folder / 'server.log')}")


def _connect(folder: Path, code: str, watched: Process, idle_seconds: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    with open(folder / "lock", "w") as lock:  # one of the clients that come at the same time starts the server
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(str(folder / "socket"))
        except (FileNotFoundError, ConnectionRefusedError):
            _start_server(folder, code, watched, idle_seconds)
            connection.connect(str(folder / "socket"))
    return connection


def _start_server(folder: Path, code: str, watched: Process, idle_seconds: float) -> None:
    """Returns when it listens; it answers after its imports."""
    print("starting the fork server (imports torch and deepspeed once)", file=sys.stderr, flush=True)
    for name in ("socket", "server.log"):
        (folder / name).unlink(missing_ok=True)
    setup = {"folder": str(folder), "fingerprint": code, "starter": [watched.pid, watched.start_time], "idle_seconds": idle_seconds}
    with open(folder / "server.log", "xb") as log:
        command = [sys.executable, "-m", "pipeline.launch.server", json.dumps(setup)]
        done = subprocess.run(command, cwd=PROJECT_ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    if done.returncode:
        raise LaunchError(f"the fork server did not start (exit status {done.returncode}):\n{tail(folder / 'server.log')}")


def _ask(connection: socket.socket, request: Message, folder: Path) -> Message | None:
    """Sends the job with our stdout and stderr, on which rank 0 will write. None: the server is leaving and did not take it."""
    taken, decoder = False, Decoder()
    try:
        _send(connection, encode(request))
        while True:
            data = connection.recv(1 << 16)
            for message in decoder.feed(data):
                match message["kind"]:
                    case "taken":
                        taken = True
                    case "leaving":
                        return None
                    case _:
                        return message
            if not data:
                break
    except (BrokenPipeError, ConnectionResetError):
        pass
    if taken:
        raise LaunchError(f"the fork server ended during the job:\n{tail(folder / 'server.log')}")
    return None


def _send(connection: socket.socket, data: bytes) -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        socket.send_fds(connection, [data[:8]], [fd if is_open(fd) else null for fd in (1, 2)])
    finally:
        os.close(null)
    connection.sendall(data[8:])

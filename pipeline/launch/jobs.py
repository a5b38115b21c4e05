"""A job inside the fork server: its ranks, from the fork to the answer."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

from pipeline.launch.failures import describe_exit, failure, is_consequence
from pipeline.launch.processes import Process, die_with_parent
from pipeline.launch.protocol import Decoder, Message, encode
from pipeline.launch.ranks import call, rank_environment, rank_log, reserve_port, tail

_GRACE_SECONDS = 0.3  # between the consequence of a failure and its cause, and for the stacks of ranks over their time


class Rank:
    def __init__(self, number: int, pid: int, reader: int, log: BinaryIO | None) -> None:
        self.number, self.pid, self.reader, self.log = number, pid, reader, log
        self.outcome: Message | None = None
        self.ended = False
        self._decoder = Decoder()

    def read(self) -> bool:
        """Takes what the rank has written to its pipe; False at its end."""
        while True:
            try:
                data = os.read(self.reader, 1 << 16)
            except BlockingIOError:
                return True
            for message in self._decoder.feed(data):
                self.outcome = message
            if not data:
                return False

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # with what it has started itself


class RunningJob:
    """Ranks of one request, killed as a whole at the first failure. A rank that is done stays until all are: others may use its store."""

    def __init__(self, request: Message, output_fds: list[int]) -> None:
        self.request = request
        self.starter = Process(*request["starter"])
        self.ranks: list[Rank] = []
        self.failures: list[Message] = []
        self.deadline = time.monotonic() + request["timeout_seconds"]
        self._kill_at: float | None = None
        self._killed = False
        self._output_fds = output_fds
        self._port_holder, self._port = reserve_port()

    def start(self, library_fds: set[int]) -> None:
        """Forks the ranks. A failure to do so is the job's, not the server's."""
        try:
            for number in range(self.request["world_size"]):
                self.ranks.append(self._fork(number, library_fds))
        except OSError as error:
            self.failures.append(failure(len(self.ranks), "not started", message=str(error)))
            self.kill()

    def _fork(self, number: int, library_fds: set[int]) -> Rank:
        log = None if number == 0 else _open_log(self.request["log_path"], number)
        stdout, stderr = self._output_fds if log is None else (log.fileno(), log.fileno())
        reader, writer = os.pipe()
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_rank(self.request, number, self._port, server_pid, (stdout, stderr, writer), library_fds)
        os.close(writer)
        os.setpgid(pid, pid)  # here and in the rank: whoever comes first
        os.set_blocking(reader, False)
        return Rank(number, pid, reader, log)

    def collect(self, rank: Rank, wait_status: int) -> None:
        """The rank has ended."""
        rank.read()
        rank.ended = True
        if rank.outcome is None and not self._killed:
            self._fail(failure(rank.number, describe_exit(wait_status)))

    def tick(self, now: float) -> None:
        """Looks at what the ranks have reported and at the clock."""
        for rank in self.ranks:
            if rank.outcome and "status" in rank.outcome and rank.outcome not in self.failures:
                self._fail(rank.outcome)
        if self.ranks and all(rank.outcome for rank in self.ranks) and not self.failures:
            self.kill()
        if now > self.deadline and self._kill_at is None and not self._killed:
            self._time_out()
        if self._kill_at is not None and now >= self._kill_at:
            self.kill()

    def _fail(self, failed: Message) -> None:
        self.failures.append(failed)
        wait = _GRACE_SECONDS if is_consequence(failed) else 0.0
        self._kill_at = min(self._kill_at or float("inf"), time.monotonic() + wait)

    def _time_out(self) -> None:
        for rank in self.ranks:
            if rank.outcome is None and not rank.ended:
                os.kill(rank.pid, signal.SIGUSR1)  # prints its stack
                message = f"not done after launch.timeout_seconds={self.request['timeout_seconds']:g}"
                self.failures.append(failure(rank.number, "time limit", message=message))
        self._kill_at = time.monotonic() + _GRACE_SECONDS

    def kill(self) -> None:
        if not self._killed:
            self._killed = True
            for rank in self.ranks:
                if not rank.ended:
                    rank.kill()

    def cancel(self, reason: str) -> None:
        if not self._killed:
            self.failures.append(failure(0, "cancelled", message=reason))
            self.kill()

    @property
    def urgent(self) -> bool:
        return self._kill_at is not None and not self._killed

    @property
    def ended(self) -> bool:
        return self._killed and all(rank.ended for rank in self.ranks)

    def answer(self) -> Message:
        if not self.failures:
            return {"kind": "done", "result": (self.ranks[0].outcome or {}).get("result")}
        for failed in self.failures:
            log = next((rank.log for rank in self.ranks if rank.number == failed["rank"]), None)
            failed["output"] = tail(log.fileno()) if log else ""
        return {"kind": "failed", "failures": self.failures}

    def close(self) -> None:
        for rank in self.ranks:
            os.close(rank.reader)
            if rank.log:
                rank.log.close()
        for fd in self._output_fds:
            os.close(fd)
        self._port_holder.close()


def _open_log(log_path: str | None, number: int) -> BinaryIO:
    if log_path is None:
        return tempfile.TemporaryFile()  # type: ignore[return-value]
    path = rank_log(Path(log_path), number)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w+b")


def _become_rank(request: Message, number: int, port: int, server_pid: int, fds: tuple[int, int, int], library_fds: set[int]) -> NoReturn:
    """The forked process, to its end."""
    stdout, stderr, writer = fds
    try:
        die_with_parent(server_pid)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for sig in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(sig, signal.SIG_DFL)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        _close_except(library_fds | {0, 1, 2, writer})
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        environment = rank_environment(
            request["environment"], number, request["world_size"], port, request["threads"], request["kernel_build"]
        )
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(request["cwd"])
        sys.argv = [request["function"]]
        _write(writer, encode(call(number, request["function"], request["args"])))
        while True:  # the server kills the ranks when all have reported
            signal.pause()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _close_except(kept: set[int]) -> None:
    """The server's connections, and the pipes and logs of other ranks."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # the listing's own
                os.close(int(name))


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]

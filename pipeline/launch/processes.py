"""Which process started us, is it still there, and dying with it (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STARTER_VARIABLE = "LOCKSTEP_STARTER_PID"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # looked up before any fork, so that a forked rank calls it without taking a loader lock


@dataclass(frozen=True)
class Process:
    """A process by number and start time (clock ticks since boot): numbers are used again."""

    pid: int
    start_time: int

    def alive(self) -> bool:
        return identify(self.pid) == self


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from `state` on; the name before them may hold blanks and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def identify(pid: int) -> Process | None:
    """The process with that number, or None if there is none or it has ended and waits to be collected."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else Process(pid, int(fields[19]))


def this_process() -> Process:
    found = identify(os.getpid())
    assert found is not None
    return found


def ancestors() -> Iterator[int]:
    """Process numbers from the parent upwards."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        fields = _stat(pid)
        pid = int(fields[1]) if fields else 0


def _is_dvc(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    names = [os.path.basename(word) for word in words[:3]]
    return names[0] == b"dvc" or (names[0].startswith(b"python") and b"dvc" in names[1:])


def starter() -> Process:
    """The process whose end means that nobody waits for our work any more.

    `python -m pipeline` names itself in LOCKSTEP_STARTER_PID, which counts only if it is this process or an ancestor (a value may
    outlive its process). Else the nearest `dvc` above us, else the parent.
    """
    chain = list(ancestors())
    named = os.environ.get(STARTER_VARIABLE, "")
    candidates = [int(named)] if named.isdigit() and int(named) in [os.getpid(), *chain] else []
    candidates += [pid for pid in chain if _is_dvc(pid)][:1] + chain[:1] + [os.getpid()]
    return next(found for found in map(identify, candidates) if found is not None)


def die_with_parent(parent_pid: int | None = None, sig: int = signal.SIGKILL) -> None:
    """The kernel sends `sig` to this process when its parent ends. With parent_pid: leaves at once if the parent has ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def guard_process() -> None:
    """First call of a stage: when what started it is killed, the stage ends too, instead of writing on beside its successor.

    A killed `dvc` leaves its children alive otherwise. If a shell stands in between, the shell lives on; therefore the starter is
    watched too while ranks run.
    """
    die_with_parent()


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True

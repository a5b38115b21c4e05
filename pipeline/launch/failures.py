"""How the failure of a rank reaches the user."""

from __future__ import annotations

import re
import signal
from typing import Any

from pipeline import errors
from pipeline.errors import UserError

# What a healthy rank meets when another one has gone: never the cause.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|closed by peer|recvValue failed|sendBytes failed|Dist(Network|Backend)Error",
    re.IGNORECASE,
)


class LaunchError(RuntimeError):
    """The ranks could not be started or watched."""


class RankFailed(LaunchError):
    """A rank ended before its work was done. The message names it and holds its traceback.

    rank: its number; status: "exception", "exit status 3", "signal SIGKILL", "time limit".
    """

    def __init__(self, message: str, rank: int, status: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.status = status


def failure(rank: int, status: str, **details: Any) -> dict[str, Any]:
    """A rank's failure as it travels. Details: name, message, traceback (of an exception), exit_code (of a UserError), output."""
    return {"rank": rank, "status": status, **details}


def describe_exit(wait_status: int) -> str:
    """os.waitpid's status in words."""
    if not signal_of(wait_status):
        return f"exit status {wait_status >> 8}"
    try:
        return f"signal {signal.Signals(signal_of(wait_status)).name}"
    except ValueError:
        return f"signal {signal_of(wait_status)}"


def signal_of(wait_status: int) -> int:
    return wait_status & 0x7F


def is_consequence(failed: dict[str, Any]) -> bool:
    return failed["status"] == "exception" and bool(_CONSEQUENCE.search(f"{failed.get('name')} {failed.get('message')}"))


def raise_failure(failures: list[dict[str, Any]], world_size: int) -> None:
    """Raises what the first true cause in `failures` (in the order of their arrival) says: a UserError or RankFailed."""
    cause = next((failed for failed in failures if not is_consequence(failed)), failures[0])
    if "exit_code" in cause:
        raise _user_error(cause)
    rank, status = cause["rank"], cause["status"]
    what = cause["name"] if status == "exception" else status
    headline = f"rank {rank} of {world_size} failed: {what}" + (f": {cause['message']}" if cause.get("message") else "")
    if status == "signal SIGKILL":
        headline += " (from outside: the kernel does this when memory runs out)"
    lines = [headline]
    if cause.get("traceback"):
        lines.append(cause["traceback"].rstrip())
    if cause.get("output"):
        lines += [f"--- last output of rank {rank} ---", cause["output"].rstrip()]
    for other in failures:
        if other is not cause:
            lines.append(f"also rank {other['rank']}: {other['status']} {other.get('name', '')} {other.get('message', '')}".rstrip())
    raise RankFailed("\n".join(lines), rank, status)


def _user_error(cause: dict[str, Any]) -> UserError:
    known = getattr(errors, cause["name"], UserError)
    error = known(cause["message"]) if isinstance(known, type) and issubclass(known, UserError) else UserError(cause["message"])
    error.exit_code = cause["exit_code"]
    return error

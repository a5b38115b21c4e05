"""Calls DVC for the experiments of one command, and reads the verdict from the comparison it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipeline import failures
from pipeline.errors import MissingPrerequisite, ResultsDiffer, UserError
from pipeline.launch.processes import die_with_parent
from pipeline.paths import ROOT, Paths


class StageFailed(UserError):
    """A stage ended with an error of its own, which it has printed; the exit code is the stage's."""

    def __init__(self, message: str, exit_code: int, stage: str = "", key: str = ""):
        super().__init__(message)
        self.exit_code, self.stage, self.key = exit_code, stage, key


def run_dvc(targets: list[str], root: Path = ROOT) -> None:
    """One `dvc repro` of all targets; its output, and its stages', goes to stderr. Raises StageFailed."""
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", *targets]
    # `python` in dvc.yaml is this one; the fork server goes away with this process
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = os.environ | {"PATH": path, "LOCKSTEP_STARTER_PID": str(os.getpid())}
    environment.pop("HYDRA_FULL_ERROR", None)
    parent = os.getpid()  # a killed command must not leave DVC, and below it ranks, at work
    with one_at_a_time(root):
        failures.clear(root)
        done = subprocess.run(
            command, check=False, cwd=root, env=environment, stdout=sys.stderr, preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM)
        )
        failure = failures.last(root)
    if done.returncode == 0:
        return
    if failure:
        raise StageFailed(f"{failure.where}: {failure.message}{_way_out(failure)}", failure.exit_code, failure.stage, failure.key)
    raise StageFailed(f"dvc repro {' '.join(targets)}: failed with code {done.returncode}; the reason is above", 1)


def _way_out(failure: failures.Failure) -> str:
    """A source that can't be fetched would stop every later `dvc repro`, too."""
    return " (`python -m pipeline --forget KEY` takes its runs out of params.yaml)" if failure.stage in ("fetch", "prompts") else ""


@contextmanager
def one_at_a_time(root: Path = ROOT) -> Iterator[None]:
    """Two repros that share a stage end with DVC's "busy", and its --wait-for-lock does not cover that: the second command waits here."""
    lock = FileLock(root / ".dvc" / "tmp" / "pipeline.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("another `python -m pipeline` is at work in this clone; waiting for it", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def verdict_of(experiment: str, root: Path = ROOT) -> int:
    """Runs what changed in one experiment and prints a line per run and the verdict on stdout. The exit code: 0 or that of ResultsDiffer.

    Raises StageFailed; an older comparison that a failed run has left in place is never read.
    """
    from pipeline.tracking import is_pending

    was_pending = is_pending(experiment, Paths(root))
    try:
        run_dvc(["config", f"track@{experiment}"], root)
        if was_pending and is_pending(experiment, Paths(root)):  # a cached track would never bring an unreachable server up to date
            run_dvc(["--force", "--single-item", f"track@{experiment}"], root)
    except StageFailed as failed:
        # track of this experiment fails like this when all is compared, and differs; after any other failure the comparison may be old
        if (failed.stage, failed.key, failed.exit_code) != ("track", experiment, ResultsDiffer.exit_code):
            raise
    comparison = read_comparison(Paths(root).comparison(experiment))
    width = max(len(run["run_id"]) for run in comparison["runs"])
    for run in comparison["runs"]:
        print(f"{run['run_id']:<{width}}  {run['result_digest']}")
    print(verdict_line(comparison), flush=True)
    return 0 if comparison["verdict"] in ("identical", "alone") else ResultsDiffer.exit_code


def verdict_line(comparison: dict[str, Any]) -> str:
    match comparison["verdict"]:
        case "identical":
            return f"identical: {comparison['result_digest']}"
        case "alone":
            return f"alone: {comparison['result_digest']} (one run; -m compares several layouts)"
        case _:
            return f"different: {comparison['reasons'][0]}"


def read_comparison(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise MissingPrerequisite(f"{path.name}: {path.parent} has none; run `dvc repro` and look at its first error")
    return json.loads(path.read_text(encoding="utf-8"))

"""Calls DVC for the experiments of one command, and reads the verdict from the comparison it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipeline import failures, registry
from pipeline.errors import MissingPrerequisite, ResultsDiffer, UserError
from pipeline.launch.processes import die_with_parent
from pipeline.narration import Narration
from pipeline.paths import ROOT, Paths


class StageFailed(UserError):
    """A stage ended with an error of its own, which it has printed; the exit code is the stage's."""

    def __init__(self, message: str, exit_code: int, stage: str = "", key: str = ""):
        super().__init__(message)
        self.exit_code, self.stage, self.key = exit_code, stage, key


def run_dvc(targets: list[str], root: Path = ROOT, experiment: str | None = None) -> None:
    """One `dvc repro` of all targets; its output, and its stages', goes to stderr, as the progress of `experiment` where one is given.

    Raises StageFailed.
    """
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", *targets]
    # `python` in dvc.yaml is this one; the fork server goes away with this process
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = os.environ | {"PATH": path, "LOCKSTEP_STARTER_PID": str(os.getpid())}
    environment.pop("HYDRA_FULL_ERROR", None)
    if "--force" in targets and "--single-item" not in targets:
        environment["LOCKSTEP_FRESH"] = uuid.uuid4().hex  # each stage's log will name the command that executed it
    with one_at_a_time(root), narration_of(experiment, root) if experiment else contextlib.nullcontext() as narration:
        failures.clear(root)
        returncode = _run(command, root, environment, narration.hear if narration else None)
        failure = failures.last(root)
        if returncode and failure:
            raise StageFailed(f"{failure.where}: {failure.message}{_way_out(failure)}", failure.exit_code, failure.stage, failure.key)
        if returncode:
            raise StageFailed(f"dvc repro {' '.join(targets)}: failed with code {returncode}; the reason is above", 1)


def _run(command: list[str], root: Path, environment: dict[str, str], hear: Callable[[str], None] | None) -> int:
    """The exit code of DVC, whose lines `hear` takes as they come."""
    parent = os.getpid()  # a killed command must not leave DVC, and below it ranks, at work
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if hear else {"stdout": sys.stderr}
    with subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        text=True,
        errors="replace",
        preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
        **output,
    ) as dvc:
        for line in dvc.stdout if hear and dvc.stdout else ():
            hear(line.rstrip("\n"))  # type: ignore[misc]
    return dvc.returncode


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


def verdict_of(experiment: str, root: Path = ROOT, fresh: bool = False) -> int:
    """Runs what changed in one experiment (fresh: everything, without caches) and prints a line per run, where the report lies and the
    verdict on stdout. The exit code: 0 or that of ResultsDiffer.

    Raises StageFailed; an older comparison that a failed run has left in place is never read.
    """
    from pipeline.tracking import is_pending

    was_pending = is_pending(experiment, Paths(root))
    targets = ["config", f"track@{experiment}"]
    try:
        run_dvc(["--force", "--no-run-cache", *targets] if fresh else targets, root, experiment)
        if was_pending and is_pending(experiment, Paths(root)):  # a cached track would never bring an unreachable server up to date
            run_dvc(["--force", "--single-item", f"track@{experiment}"], root)
    except StageFailed as failed:
        # track of this experiment fails like this when all is compared, and differs; after any other failure the comparison may be old
        if (failed.stage, failed.key, failed.exit_code) != ("track", experiment, ResultsDiffer.exit_code):
            raise
    path = Paths(root).comparison(experiment)
    comparison = read_comparison(path)
    print(*summary_table(comparison), sep="\n")
    print(f"report: {path.with_suffix('.html').relative_to(root)}")
    print(verdict_line(comparison), flush=True)
    return 0 if comparison["verdict"] in ("identical", "alone") else ResultsDiffer.exit_code


def narration_of(experiment: str, root: Path) -> Narration:
    """How far the experiment has come, from what DVC says of its stages."""
    known = registry.load(root)
    runs = known.experiment(experiment).runs
    return Narration(experiment, runs, known.num_stages(experiment))


def summary_table(comparison: dict[str, Any]) -> list[str]:
    """A line per run: key, result digest, seconds of all its steps where they were measured, and their ratio to the oracle's."""
    times = {run["run_id"]: _total_time(run) for run in comparison["runs"]}
    base, width = times.get(comparison.get("oracle", "")), max(len(run) for run in [*times, "run"])
    lines = [f"{'run':<{width}}  {'result digest':<64}  {'time':>8}  ratio"]
    for run in comparison["runs"]:
        time = times[run["run_id"]]
        ratio = f"{time / base:5.2f}" if time and base else "    -"
        lines.append(f"{run['run_id']:<{width}}  {run['result_digest']}  {f'{time:.1f} s' if time else '-':>8}  {ratio}")
    return lines


def _total_time(run: dict[str, Any]) -> float | None:
    """None when some step came from a cache."""
    steps = [values.get("perf/step_time") for values in run.get("performance", {}).values()]
    return sum(steps) if steps and None not in steps else None


def verdict_line(comparison: dict[str, Any]) -> str:
    match comparison["verdict"]:
        case "identical":
            return f"identical: {comparison['result_digest']}"
        case "alone":
            return f"alone: {comparison['result_digest']} (one run; -m compares several layouts)"
        case _:
            return f"different: {comparison['reasons'][0]}"


def print_case_matrix(experiments: list[str], root: Path = ROOT) -> None:
    """Of experiments that differ in their kernels: what each case breaks and costs, on stdout and as a report."""
    from pipeline.evidence.cases import table, write_case_matrix

    comparisons = [read_comparison(Paths(root).comparison(key)) for key in experiments]
    folder = Paths(root).report(f"{experiments[0]}-cases")
    print(*table(write_case_matrix(folder, comparisons)), sep="\n")
    print(f"report: {(folder / 'cases.html').relative_to(root)}", flush=True)


def read_comparison(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise MissingPrerequisite(f"{path.name}: {path.parent} has none; run `dvc repro` and look at its first error")
    return json.loads(path.read_text(encoding="utf-8"))

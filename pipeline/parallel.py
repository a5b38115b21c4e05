"""Runs of a sweep side by side (`--jobs N`): each job works in a git worktree of its own, and all share this clone's DVC cache.

Two `dvc repro` in one clone would wait for each other, or end with "busy". So the runs are made ahead, in the worktrees; the clone's own
`dvc repro` then finds their stages in the run cache, and compares. A job is a process here (`basic`), a Slurm job (`submitit`) or a task of
a ray cluster (`ray`); the latter two need the clone's folder on a file system that their machines share.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from pipeline import registry, repro
from pipeline.errors import MissingPrerequisite, UserError
from pipeline.paths import ROOT

LAUNCHERS = ("basic", "submitit", "ray")
_GENERATED = ("params.yaml", "env.json")  # what a worktree takes from the clone, not from the commit


def run_ahead(keys: Sequence[str], jobs: int, launcher: str = "basic", root: Path = ROOT) -> None:
    """Makes the runs with these keys in `jobs` worktrees at once, after `check`; what they share comes first, here. Raises StageFailed."""
    parts = [part for part in (list(keys[i::jobs]) for i in range(jobs)) if part]
    known = registry.load(root)
    shared = {f"prompts@{cfg.checkpoint.name}--{cfg.data.name}" for cfg in map(known.run, keys)}
    repro.run_dvc(["config", *sorted(shared)], root)
    with worktrees(len(parts), root) as folders:
        commands = [[sys.executable, "-m", "pipeline.parallel", *part] for part in parts]
        codes = _start(launcher, commands, folders, root)
        for part, folder in zip(parts, folders):
            for key in part:  # times, and which stages were executed
                if (folder / "logs" / key).is_dir():
                    shutil.copytree(folder / "logs" / key, root / "logs" / key, dirs_exist_ok=True)
    for part, code in zip(parts, codes):
        if code:
            raise repro.StageFailed(f"--jobs: the job of {', '.join(part)} failed with code {code}; the reason is above", code)


def check(jobs: int, launcher: str, root: Path = ROOT) -> None:
    """Raises UserError or MissingPrerequisite before anything starts."""
    if jobs < 1:
        raise UserError(f"--jobs {jobs}: give 1 or more")
    if launcher not in LAUNCHERS:
        raise UserError(f"--launcher {launcher}: unknown; use {', '.join(LAUNCHERS)}")
    if launcher != "basic" and importlib.util.find_spec(launcher) is None:
        raise MissingPrerequisite(f"--launcher {launcher}: the package is not installed; pip install {launcher}, or use --launcher basic")
    status = _git(root, "status", "--porcelain", "--", "conf", "kernels", "pipeline", "stages", "dvc.yaml", "requirements.lock", ".dvc")
    if status.strip():
        changed = status.splitlines()[0][3:]
        raise UserError(
            f"--jobs {jobs}: {changed} is not committed, and a worktree has committed files only; commit it, or leave --jobs out"
        )


@contextmanager
def worktrees(count: int, root: Path = ROOT) -> Iterator[list[Path]]:
    """Folders at the clone's commit with its params.yaml, its compiled kernels and its cache; removed at the end."""
    cache = subprocess.run(
        [sys.executable, "-m", "dvc", "cache", "dir"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()
    folders = [root / ".dvc" / "tmp" / "worktrees" / f"job{i + 1}" for i in range(count)]
    try:
        for folder in folders:
            _remove(folder, root)  # of a killed command
            _git(root, "worktree", "add", "--detach", "--force", str(folder), "HEAD")
            for name in _GENERATED:
                shutil.copy(root / name, folder / name)
            if (root / "kernels/cpu/_build").is_dir():
                shutil.copytree(root / "kernels/cpu/_build", folder / "kernels/cpu/_build")
            (folder / ".dvc" / "config.local").write_text(f"[cache]\n    dir = {cache}\n")
        yield folders
    finally:
        for folder in folders:
            _remove(folder, root)


def _remove(folder: Path, root: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _git(root, "worktree", "prune")


def _start(launcher: str, commands: list[list[str]], folders: list[Path], root: Path) -> list[int]:
    """Exit codes of the commands, each in its folder, all at once."""
    match launcher:
        case "submitit":
            import submitit  # pyright: ignore[reportMissingImports]  # an extra

            executor = submitit.AutoExecutor(folder=root / "logs" / "submitit")
            executor.update_parameters(name="lockstep", timeout_min=24 * 60)
            return [job.result() for job in [executor.submit(_call, *pair) for pair in zip(commands, folders)]]
        case "ray":
            import ray  # pyright: ignore[reportMissingImports]  # an extra

            ray.init(ignore_reinit_error=True)
            return ray.get([ray.remote(_call).remote(*pair) for pair in zip(commands, folders)])
        case _:
            with ThreadPoolExecutor(len(commands)) as pool:
                return list(pool.map(_call, commands, folders))


def _call(command: list[str], folder: Path) -> int:
    return subprocess.run(command, cwd=folder, stdout=sys.stderr).returncode


def _git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True)
    if done.returncode:
        raise MissingPrerequisite(f"--jobs: git {args[0]} failed: {done.stderr.strip().splitlines()[-1]}; a clone with git is needed")
    return done.stdout


def main(keys: list[str]) -> int:
    """In a worktree: its part of the runs."""
    try:
        repro.run_dvc([f"validate@{key}" for key in keys])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What every stage does around its work: arguments, one writer per run, outputs that appear whole or not at all, and the launch.

A stage's own process stays light: it imports no torch. The work runs in the ranks that `pipeline.launch` starts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from pipeline import failures, launch, registry
from pipeline.config import Config, Launch, to_config
from pipeline.digest import read_json, sha256_folder
from pipeline.errors import UserError
from pipeline.layout import MeshShape
from pipeline.paths import Paths, Step, step


@dataclass
class Job:
    """One stage of one run (and iteration), with its configuration and its paths."""

    stage: str
    key: str
    iteration: int | None
    paths: Paths = field(default_factory=Paths)

    @classmethod
    def from_args(cls, args: dict[str, Any]) -> Job:
        job = cls(args["stage"], args["key"], args["iteration"])
        job.cfg = to_config(args["cfg"])  # the client's: params.yaml is long when many runs are in it
        return job

    def args(self) -> dict[str, Any]:
        """What a rank needs to make this job again."""
        return {"stage": self.stage, "key": self.key, "iteration": self.iteration}

    def of(self, stage: str, iteration: int | None) -> Job:
        """The same run's job of another stage and iteration."""
        job = Job(stage, self.key, iteration, self.paths)
        job.cfg = self.cfg
        return job

    @cached_property
    def cfg(self) -> Config:
        return registry.load(self.paths.root).run(self.key)

    @cached_property
    def step(self) -> Step:
        assert self.iteration is not None
        return step(self.paths, self.key, self.iteration, self.cfg.checkpoint.name)

    @property
    def checkpoint(self) -> Path:
        return self.paths.checkpoint(self.cfg.checkpoint.name)

    @property
    def mesh_shape(self) -> MeshShape:
        layout = self.cfg.layout
        return MeshShape(layout.tp, layout.cp, layout.dp)

    @property
    def log(self) -> Path:
        """Timings and status: for people and for the performance section, never an output."""
        folder = self.paths.logs(self.key)
        return (folder / f"i{self.iteration:04d}" if self.iteration else folder) / f"{self.stage}.json"

    def prompts(self) -> list:
        from pipeline.records import prompts_of_iteration, read_prompts

        folder = self.paths.prompts(self.cfg.checkpoint.name, self.cfg.data.name)
        return prompts_of_iteration(read_prompts(folder), self.cfg.sampling.prompts_per_iteration, self.iteration or 1)

    def launch(self, world_size: int, **args: Any) -> dict[str, Any]:
        """Runs `stages.<stage>:rank_main` on every rank; its timings go to the log."""
        started = time.perf_counter()
        args |= self.args() | {"cfg": asdict(self.cfg)}
        timings = launch.run_job(f"stages.{self.stage}:rank_main", args, world_size, self.cfg.launch, self.log)
        self.write_log({"status": "ok", "timings": {**timings, "wall_time": time.perf_counter() - started}, "world_size": world_size})
        return timings

    def write_log(self, content: dict[str, Any]) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        content = content | {"fresh": os.environ.get("LOCKSTEP_FRESH")}  # which `verify=fresh` command has executed this
        self.log.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")

    @contextlib.contextmanager
    def outputs(self, *paths: Path) -> Iterator[list[Path]]:
        """Temporary folders to write to; they take their names when the stage has succeeded. The log names the bytes of the first."""
        with single_writer(self.paths.logs(self.key) / f"{self.stage}.lock"):
            with new_folders(*paths) as folders:
                yield folders
            if self.log.exists():
                self.write_log({**read_json(self.log), "output": sha256_folder(paths[0])})


@contextlib.contextmanager
def single_writer(lock_path: Path) -> Iterator[None]:
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock_path, timeout=5):
            yield
    except Timeout:
        raise UserError(f"{lock_path}: another process is writing these outputs; wait for it, or end it, and run again") from None


@contextlib.contextmanager
def new_folders(*paths: Path) -> Iterator[list[Path]]:
    """A fresh temporary sibling for each path, renamed over it at the end; removed when the block fails."""
    temporary = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in paths]
    for path, tmp in zip(paths, temporary):
        if any(parent.is_symlink() for parent in (path, *path.parents)):
            raise UserError(f"{path}: lies behind a symbolic link; make it a plain folder (outputs never leave the project)")
        tmp.parent.mkdir(parents=True, exist_ok=True)
        for left in tmp.parent.glob(f".{path.name}.*.tmp"):  # of a killed run; the stage's lock keeps other writers away
            shutil.rmtree(left, ignore_errors=True)
        tmp.mkdir()
    try:
        yield temporary
        for path, tmp in zip(paths, temporary):
            shutil.rmtree(path, ignore_errors=True)
            tmp.rename(path)
    finally:
        for tmp in temporary:
            shutil.rmtree(tmp, ignore_errors=True)


def parse(stage: str, argv: list[str] | None = None) -> Job:
    parser = argparse.ArgumentParser(prog=f"python -m stages.{stage}")
    parser.add_argument("key", help="the run's (or checkpoint's, or experiment's) key in params.yaml")
    parser.add_argument("--iteration", type=int)
    parser.add_argument("--digest", help="of the run's whole configuration, as DVC has read it")
    args = parser.parse_args(argv)
    launch.guard_process()
    known = registry.load()  # stops here when params.yaml is older than conf/
    if args.digest and args.digest != known.digest_of(args.key):
        raise UserError(f"runs.{args.key}: was composed anew while DVC was at work; run the same command again")
    return Job(stage, args.key, args.iteration)


def run(main: Callable[[Any], None], stage: str, parse: Callable[[str], Job] = parse) -> None:
    """Runs a stage's main(job): a user's fault is one line and its exit code, ours is a full traceback.

    DVC hides exit codes, so the reason is also left where `python -m pipeline` looks for it. parse: makes the job from the command line.
    """
    job: Job | None = None
    try:
        job = parse(stage)
        main(job)
    except UserError as error:
        _fail(stage, job, error.exit_code, str(error))
    except launch.LaunchError as error:
        _fail(stage, job, 1, str(error))
    except KeyboardInterrupt:
        _fail(stage, job, 130, "interrupted")
    except Exception as error:
        traceback.print_exc()
        _fail(stage, job, 1, f"{type(error).__name__}: {error}")


def run_alone(stage: str) -> None:
    """A stage without ranks: `stages.<stage>:rank_main` in one process, which saves it the imports."""

    def main(job: Job) -> None:
        with single_writer(job.paths.logs(job.key) / f"{stage}.lock"):
            launch.run_job(f"stages.{stage}:rank_main", job.args(), 1, Launch())

    run(main, stage)


def _fail(stage: str, job: Job | None, exit_code: int, message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    first_line = message.strip().splitlines()[0] if message.strip() else "no message"
    failures.record(failures.Failure(stage, job.key if job else "?", job.iteration if job else None, exit_code, first_line))
    sys.exit(exit_code)

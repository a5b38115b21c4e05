"""What DVC and its stages print while they work, as progress: a live bar on a terminal, a line per finished run anywhere else.

DVC names each stage before it runs or skips it; those lines become progress. Everything else that is said passes through.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Collection
from typing import Any, Self, TextIO

_STAGE = re.compile(r"(?:Running s|S)tage '([\w-]+)@?([^']*)'")
_NOISE = re.compile(
    r"> (python -m|cp|mv) |Updating lock file|Generating lock file|Data and pipelines are up to date|Use `dvc push`|\s*git add "
    r"|To track the changes with git|To enable auto staging|\s*dvc config core.autostage|(Running s|S)tage '"
)


class Narration:
    """A context manager. runs: keys of the runs at work; num_stages: stages of DVC that they have together."""

    def __init__(self, title: str, runs: Collection[str], num_stages: int, stream: TextIO | None = None) -> None:
        self.title, self.runs, self.num_stages = title, runs, num_stages
        self.done: list[str] = []  # runs that are validated
        self._stages = 0
        self._stage: tuple[str, str] | None = None  # at work
        self._stream = stream or sys.stderr
        self._start = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("stages"), TimeElapsedColumn()
            self._bar = Progress(*columns, console=Console(file=self._stream))
            self._task = self._bar.add_task(self.title, total=self.num_stages)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if kind is None:
            self._finish_stage()
        if self._bar is not None:
            self._bar.stop()

    def hear(self, line: str) -> None:
        """One line of output, without its end."""
        if match := _STAGE.match(line):
            self._finish_stage()
            self._stage = match[1], match[2]
            self._stages += 1
            if self._bar is not None:
                self._bar.update(self._task, completed=self._stages - 1, description=self._description())
        if not line.strip() or _NOISE.match(line):
            return
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=self._stream, flush=True)

    def _description(self) -> str:
        """lattice: run 3 of 48, tp2cp2, train of iteration 2."""
        assert self._stage is not None
        stage, key = self._stage
        run, _, step = key.rpartition("-s") if re.search(r"-s\d{4}$", key) else (key, "", "")
        where = f"run {len(self.done) + 1} of {len(self.runs)}, {run.removeprefix(f'{self.title}-')}, " if run in self.runs else ""
        return f"{self.title}: {where}{stage}" + (f" of iteration {int(step)}" if step else "")

    def _finish_stage(self) -> None:
        """The next stage has begun, or all is done: the last one succeeded."""
        if self._stage is None:
            return
        stage, key = self._stage
        self._stage = None
        if self._bar is not None:
            self._bar.update(self._task, completed=self._stages)
        if stage == "validate" and key in self.runs and key not in self.done:
            self.done.append(key)
            if self._bar is None:
                now = time.monotonic()
                print(f"{key}: run {len(self.done)} of {len(self.runs)} done  {now - self._start:.0f} s", file=self._stream, flush=True)

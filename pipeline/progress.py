"""Progress on stderr: a rich bar on a terminal, one line per 10 % anywhere else, so that logs stay short."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TextIO, TypeVar

T = TypeVar("T")
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")
_QUIET_SECONDS = 1.0  # lines come no faster, but for the last: quick work gets one


class Progress:
    """Progress towards `total` (items, or bytes with unit="B"); a context manager. A total of 0 or None counts without percentages.

    Threads may call `advance` only under a lock of their own.
    """

    def __init__(self, description: str, total: int | None, unit: str = "", stream: TextIO | None = None) -> None:
        self.description = description
        self.total = total or 0
        self.unit = unit
        self.done = 0
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._tenths = 0
        self._start = self._last = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self._terminal:
            self._bar = _rich_bar(self._stream, self.unit)
            self._task = self._bar.add_task(self.description, total=self.total or None)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None and not self.total:
            self._line(f"{self._amount(self.done)}")

    def advance(self, count: int = 1) -> None:
        """Report `count` more items or bytes as done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif self.total and (tenths := min(10, 10 * self.done // self.total)) > self._tenths:
            self._tenths = tenths
            if tenths == 10 or time.monotonic() - self._last > _QUIET_SECONDS:
                self._last = time.monotonic()
                self._line(f"{10 * tenths:3d} %  {self._amount(self.done)} of {self._amount(self.total)}")

    def grow(self, count: int) -> None:
        """Raise the total, where it becomes known only on the way."""
        self.total += count
        self._tenths = min(self._tenths, 10 * self.done // max(1, self.total))
        if self._bar is not None:
            self._bar.update(self._task, total=self.total)

    def _amount(self, count: float) -> str:
        if self.unit != "B":
            return f"{count}{self.unit and ' ' + self.unit}"
        power = 0
        while count >= 1000 and power < len(_BYTE_UNITS) - 1:
            count, power = count / 1000, power + 1
        return f"{count:.{1 if power else 0}f} {_BYTE_UNITS[power]}"

    def _line(self, text: str) -> None:
        print(f"{self.description}: {text}  {time.monotonic() - self._start:.1f} s", file=self._stream, flush=True)


def track(items: Iterable[T], description: str, total: int | None = None, stream: TextIO | None = None) -> Iterator[T]:
    """Yield `items` and report how far the caller has come; total defaults to len(items) where there is one."""
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # type: ignore[arg-type]
    with Progress(description, total, stream=stream) as progress:
        for item in items:
            yield item
            progress.advance()


def _rich_bar(stream: TextIO, unit: str) -> Any:
    from rich import progress
    from rich.console import Console

    amount = progress.DownloadColumn() if unit == "B" else progress.MofNCompleteColumn()
    columns = progress.TextColumn("{task.description}"), progress.BarColumn(), amount, progress.TimeRemainingColumn()
    return progress.Progress(*columns, console=Console(file=stream))

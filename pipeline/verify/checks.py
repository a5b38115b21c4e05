"""What was compared, what did not hold, and what could not be compared."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

from .document import same

# What a value of another kind than expected raises on the way; then it can't be followed, and that is a fault.
NOT_FOLLOWED = (ArithmeticError, AttributeError, LookupError, OSError, StopIteration, TypeError, ValueError, struct.error)


class Enough(Exception):
    """The first fault, where one is enough."""


class Checks:
    """Counts what was compared and keeps what did not hold."""

    def __init__(self, stop_at_first: bool = False) -> None:
        self.count = 0
        self.faults: list[str] = []
        self.notes: list[str] = []  # what was left out, and why
        self.stop_at_first = stop_at_first

    def that(self, holds: Any, place: str, fault: str) -> bool:
        self.count += 1
        if not holds:
            self.faults.append(f"{place}: {fault}")
            if self.stop_at_first:
                raise Enough
        return bool(holds)

    def equal(self, place: str, value: Any, expected: Any) -> bool:
        """The same JSON: 1, 1.0 and true are three values, as are 0.0 and -0.0."""
        self.count += 1
        return True if same(value, expected) else self.that(False, place, f"is {short(value)}, expected {short(expected)}")

    def follow(self, place: str, check: Callable[..., Any], *args: Any) -> None:
        """Runs a check; what it can't follow is a fault, as nobody can say that it holds."""
        try:
            check(*args)
        except NOT_FOLLOWED as error:
            self.that(False, place, f"cannot be followed ({type(error).__name__}: {error})")

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def alike(values: Sequence[Any]) -> bool:
    """All there and all the same."""
    return all(value is not None and same(value, values[0]) for value in values)


def short(value: Any) -> str:
    """One line of ASCII, however long the value: a report may hold anything, and a terminal obeys control characters."""
    text = json.dumps(value, default=str)
    return text if len(text) < 160 else f"{text[:120]}... ({len(text)} characters)"

"""What a mutation should lead to, what the checker said, and whether that is the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Expected:
    """What must be said of a mutation: the place where stored results part, a reason that holds these words, or both."""

    place: Mapping[str, Any] | None = None  # fields of first_difference that must be exactly so; None: no stored result differs
    reason: str = ""  # part of one error of the validation, or of one reason of the comparison

    def __post_init__(self) -> None:
        if not self.place and not self.reason:
            raise ValueError("a mutation must be named: give a place or a reason")

    @property
    def text(self) -> str:
        return "; ".join(part for part in (place_text(self.place), self.reason and f"“{self.reason}”") if part)


@dataclass(frozen=True)
class Found:
    """What validation and comparison said."""

    verdict: str  # identical | different | failed: a stage ended with an error of its own
    place: Mapping[str, Any] | None = None  # first_difference
    reasons: list[str] = field(default_factory=list)  # of the comparison, and every error of every validation
    exit_code: int | None = None  # of the command, where one was run


@dataclass(frozen=True)
class Outcome:
    """What became of one mutation."""

    name: str
    kind: str
    row: str  # of the table: many alike share one
    expected: str
    found: str
    fault: str  # empty: found, and named as expected
    seconds: float


def fault_of(expected: Expected, found: Found, oracle: str, changed: str) -> str:
    """Why a mutation does not count as found: it survived, or another place was named. Empty when all is right."""
    if found.verdict == "identical":
        return "survived: the checker says identical"
    if expected.place is None and found.place is not None:
        return "misnamed: a stored result is said to differ"
    if expected.place is not None:
        if found.place is None:
            return "misnamed: no place"
        wrong = [f"{key} is {found.place.get(key)}" for key, value in expected.place.items() if found.place.get(key) != value]
        wrong += [] if found.place["runs"] == [oracle, changed] else [f"runs are {found.place['runs']}"]
        if wrong:
            return f"misnamed: {', '.join(wrong)}"
    if expected.reason and not any(expected.reason in reason for reason in found.reasons):
        return "misnamed: no such reason"
    return ""


def said(found: Found) -> str:
    """In one line: the place, else the first reason."""
    return str(found.place["text"]) if found.place else next(iter(found.reasons), found.verdict)


def place_text(place: Mapping[str, Any] | None) -> str:
    if not place:
        return ""
    step = f", step {place['step']}" if place.get("step") is not None else ""
    index = "" if place.get("index") is None else str(place["index"])
    tensor = f": {place['tensor']}{index}" if "tensor" in place else ""
    return f"iteration {place['iteration']}{step}, {place['quantity']}{tensor}"

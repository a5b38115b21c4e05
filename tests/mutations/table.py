"""The outcomes as a table for a terminal, or in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.mutations.verdicts import Outcome

COLUMNS = ("mutation", "kind", "expected", "found", "seconds")
WIDTH = 120  # of a cell in Markdown


@dataclass(frozen=True)
class Row:
    mutation: str
    kind: str
    expected: str
    found: str
    seconds: float
    good: bool

    @property
    def cells(self) -> tuple[str, ...]:
        return self.mutation, self.kind, self.expected, self.found, f"{self.seconds:.1f}"


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """One a mutation; those that share a row are counted in it, but for what was not found: that has rows of its own."""
    together: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        together.setdefault((outcome.kind, outcome.row), []).append(outcome)
    table = []
    for (kind, row), own in together.items():
        good, seconds = sum(not outcome.fault for outcome in own), sum(outcome.seconds for outcome in own)
        if len(own) == 1 and own[0].name == row:
            expected, found = own[0].expected, own[0].found
        else:
            row, expected, found = f"{row} ({len(own)})", f"such as {own[-1].expected}", f"{good} of {len(own)} as expected"
        table.append(Row(row, kind, expected, found, seconds, good == len(own)))
        table += [Row(o.name, kind, o.expected, f"{o.fault.upper()}: {o.found}", o.seconds, False) for o in own if o.fault]
    return table


def summary(outcomes: Sequence[Outcome]) -> str:
    return f"{sum(not outcome.fault for outcome in outcomes)} of {len(outcomes)} found"


def print_table(outcomes: Sequence[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(*COLUMNS, show_lines=True)
    table.columns[-1].justify = "right"
    for row in rows(outcomes):
        table.add_row(*(cell.replace("[", r"\[") for cell in row.cells), style=None if row.good else "bold red")
    (console if console.is_terminal else Console(width=200)).print(table)


def markdown(outcomes: Sequence[Outcome]) -> str:
    def cell(text: str) -> str:
        text = text.replace("|", r"\|").replace("_", r"\_").replace("*", r"\*").replace("<", "&lt;")
        return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"

    lines = [COLUMNS, ("---",) * len(COLUMNS), *(tuple(map(cell, row.cells)) for row in rows(outcomes))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

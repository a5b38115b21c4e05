"""python -m pipeline.verify FILE: the command line, what it prints, and its exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from . import coverage, document, form, report as whole
from .checks import Checks

DESCRIPTION = """Checks a comparison report, ours or the published one, with the standard library alone.

Exit status: 0 consistent, 2 not a report (or a bad argument), 3 inconsistent."""
MOST = 50  # faults that are printed


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.verify", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="the JSON of a comparison")
    parser.add_argument("--coverage", action="store_true", help="name the values that no check of the report alone can cover, and why")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        report = document.read(args.report)
        checks = whole.verify(report)
    except (OSError, ValueError) as error:
        say(f"error: {args.report}: {error}; give the JSON of a comparison", sys.stderr)
        return 2
    if checks.faults:
        say_faults(checks)
        return 3
    steps = len(report["runs"][0]["steps"])
    say(f"consistent: {len(report['runs'])} runs, {steps} steps, {checks.count} checks")
    say_list("not checked:", checks.notes)
    say_list("what a report cannot show:", whole.CANNOT_KNOW)
    if args.coverage:
        say_list("values that no check of the report alone covers:", coverage.lines(report))
    return 0


def say_faults(checks: Checks) -> None:
    for fault in checks.faults[:MOST]:
        say(f"inconsistent: {fault}")
    if len(checks.faults) > MOST:
        say(f"inconsistent: and {len(checks.faults) - MOST} more")


def say_list(title: str, texts: Iterable[str]) -> None:
    texts = list(texts)
    if texts:
        say(title)
    for text in texts:
        say(f"  {text}")


def say(text: str, file=None) -> None:
    """One line: names in a report may hold anything, and a terminal obeys control characters."""
    print("".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text).encode("ascii", "backslashreplace").decode(), file=file)

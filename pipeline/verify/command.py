"""python -m pipeline.verify FILE: the command line, what it prints, and its exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import coverage, document, folder_checks, form
from . import report as whole
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
    parser.add_argument("--root", type=Path, metavar="PROJECT", help="a project folder: check all runs against their files in it")
    parser.add_argument("--run", type=Path, metavar="FOLDER", action="append", default=[], help="the folder of one run (may come again)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        report = document.read(args.report)
        checks = whole.verify(report)
    except (OSError, ValueError) as error:
        say(f"error: {args.report}: {error}; give the JSON of a comparison", sys.stderr)
        return 2
    try:
        if not checks.faults:
            check_files(report, args, checks)
    except ValueError as error:
        say(f"error: {error}", sys.stderr)
        return 2
    if checks.faults:
        say_faults(checks)
        return 3
    steps, verdict = len(report["runs"][0]["steps"]), f"; its verdict: {report['verdict']}" if form.is_ours(report) else ""
    say(f"consistent: {len(report['runs'])} runs, {steps} steps, {checks.count} checks{verdict}")
    say_list("not checked:", checks.notes)
    say_list("what this cannot show:", [*(whole.FILES if args.root else (whole.HASHES, whole.FILES[1])), *whole.CANNOT_KNOW])
    if args.coverage:
        say_list("values that no check of the report alone covers:", coverage.lines(report))
    return 0


def check_files(report: dict[str, Any], args: argparse.Namespace, checks: Checks) -> None:
    """ValueError for folders that can't be those of the report."""
    if (args.root or args.run) and not form.is_ours(report):
        raise ValueError("--root, --run: runs of the published report are not laid out as ours; give neither")
    if args.root and not args.root.is_dir():
        raise ValueError(f"--root {args.root}: is no folder; give that which holds runs/")
    keys = [run["run_id"] for run in report["runs"]]
    for path in args.run:
        if not path.is_dir() or path.resolve().name not in keys:
            raise ValueError(f"--run {path}: is no folder of a run of the report; give one of {', '.join(keys)}")
    if args.root:
        checks.follow("files", folder_checks.check_project, report, args.root, checks)
    if args.run:
        checks.follow("files", folder_checks.check_folders, report, args.run, checks)


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
    line = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text).encode("ascii", "backslashreplace").decode()
    try:
        print(line, file=file, flush=True)
    except BrokenPipeError:  # the reader has seen enough; the exit status still counts
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

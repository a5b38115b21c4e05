"""`python -m tests.mutations`: breaks one thing at a time; exit code 0 when the checker finds each and names it rightly, else 1."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pipeline.progress import track
from tests.mutations import evidence_files, files
from tests.mutations.cache import CASES, cache_outcome
from tests.mutations.clone import Clone
from tests.mutations.mutation import Mutation
from tests.mutations.outcomes import outcomes
from tests.mutations.runs import Runs, real_runs, synthetic_runs
from tests.mutations.shared import shared_sweep
from tests.mutations.sources import PATCHES, source_outcome
from tests.mutations.sweep import sweep
from tests.mutations.table import markdown, print_table, summary
from tests.mutations.verdicts import Outcome

NAMED = [*files.MUTATIONS, *evidence_files.MUTATIONS]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--files", action="store_true", help="only files that runs left behind (a minute)")
    parser.add_argument("--sources", action="store_true", help="only source code, run on real ranks, and DVC's cache (ten minutes)")
    parser.add_argument("--markdown", action="store_true", help="the table in Markdown")
    parser.add_argument("--only", metavar="NAME", default="", help="mutations whose name holds NAME")
    args = parser.parse_args(argv)
    both = args.files == args.sources
    with tempfile.TemporaryDirectory(prefix="lockstep-mutations-") as folder:
        own = list(said_at_once(run(Path(folder), args.files or both, args.sources or both, args.only)))
    if not own:
        print(f"error: --only {args.only}: no mutation has this in its name", file=sys.stderr)
        return 2
    print(markdown(own)) if args.markdown else print_table(own)
    print(f"\n{summary(own)}")
    return 1 if any(outcome.fault for outcome in own) else 0


def run(folder: Path, with_files: bool, with_sources: bool, only: str) -> Iterator[Outcome]:
    patches = [patch for patch in PATCHES if with_sources and only in patch.name]
    cases = [case for case in CASES if with_sources and only in case.name]
    clone = None
    if patches or cases:
        print("a clone, and a small experiment in it, which must be identical before anything is broken", file=sys.stderr, flush=True)
        clone = Clone(folder)
    if with_files:
        runs = real_runs(folder) or (real_runs(folder, clone.folder, clone.experiment) if clone else None)
        yield from file_outcomes(runs or synthetic_runs(folder), only)
    if clone:
        for case in track(cases, "damaged objects in DVC's cache"):
            yield cache_outcome(clone, case)
        for patch in track(patches, "source mutations"):
            yield source_outcome(clone, patch)


def file_outcomes(runs: Runs, only: str = "", thorough: bool = True) -> Iterator[Outcome]:
    """All mutations of files. thorough: named ones go through the stages validate and compare, readbacks of all ranks are broken.

    Raises RuntimeError when the runs are not identical to begin with.
    """
    if runs.check([]).verdict != "identical":
        raise RuntimeError(f"{runs.kind}: not identical before anything is broken")

    def chosen(mutations: Iterable[Mutation], kind: str) -> Iterable[Mutation]:
        return track([mutation for mutation in mutations if only in mutation.name], f"{runs.kind}: {kind}")

    for of, kind in (("other", "files of one run"), ("oracle", "files of the oracle")):
        yield from outcomes(runs, chosen(sweep(runs, of, thorough), kind), kind)
    yield from outcomes(runs, chosen(shared_sweep(runs), "files of every run"), "files of every run")
    yield from outcomes(runs, chosen(NAMED, "run folder"), "run folder", by_stages=thorough)


def said_at_once(results: Iterable[Outcome]) -> Iterator[Outcome]:
    """What was not found is told before the table."""
    for outcome in results:
        if outcome.fault:
            print(f"{outcome.name}: {outcome.fault}\n  expected {outcome.expected}\n  said {outcome.found}", file=sys.stderr, flush=True)
        yield outcome


if __name__ == "__main__":
    sys.exit(main())

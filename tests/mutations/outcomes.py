"""Applies mutations of run folders one by one, and says of each whether the checker found and named it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from tests.mutations.mutation import Mutation
from tests.mutations.runs import Runs
from tests.mutations.verdicts import Outcome, fault_of, said


def outcomes(runs: Runs, mutations: Iterable[Mutation], kind: str, by_stages: bool = False) -> Iterator[Outcome]:
    """by_stages: through the stages validate and compare, which write every report; otherwise through what they are made of."""
    for mutation in mutations:
        started = time.perf_counter()
        expected = mutation.change(runs)
        validated = {"other": [runs.other], "oracle": [runs.oracle], "all": list(runs.configs), "none": []}[mutation.validated]
        try:
            found = (runs.check_by_stages if by_stages else runs.check)(validated)
        finally:
            runs.restore(*mutation.files)
        fault = fault_of(expected, found, runs.oracle, runs.other)
        yield Outcome(mutation.name, kind, mutation.row, expected.text, said(found), fault, time.perf_counter() - started)

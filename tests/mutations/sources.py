"""Runs each source mutation on real ranks, against runs of the unbroken code."""

from __future__ import annotations

import time

from pipeline.errors import ResultsDiffer
from tests.mutations.clone import ORACLE, Clone
from tests.mutations.patches import KERNELS, SUMS, Patch
from tests.mutations.patches_ranks import COUNTS, RANKS, STALE
from tests.mutations.verdicts import Outcome, fault_of, said

PATCHES = [*SUMS, *KERNELS, *RANKS, *STALE, *COUNTS]


def source_outcome(clone: Clone, patch: Patch) -> Outcome:
    started, key = time.perf_counter(), clone.keys[patch.layout]
    with clone.patched(patch.file, patch.old, patch.new):
        found = clone.run_again(key)
    clone.restore(key)
    fault = fault_of(patch.expected, found, clone.keys[ORACLE], key)
    if not fault and found.verdict == "different" and found.exit_code != ResultsDiffer.exit_code:
        fault = f"the command ended with {found.exit_code}, expected {ResultsDiffer.exit_code}"
    seconds = time.perf_counter() - started
    name = f"{patch.name} ({patch.layout})"
    return Outcome(name, f"source: {patch.kind}", name, patch.expected.text, said(found), fault, seconds)

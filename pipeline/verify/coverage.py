"""Which values no check of the report alone can cover, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import form
from .doctoring import unnoticed

TIMES = "a time measured once: sums and rates hold it as far as it is a part of them and rounding lets through"
ARRAYS = "the report has hashes over whole arrays, not over one token; --root reads the arrays"
TENSORS = "how many tensors there are and which of them differ, where a run failed; --root hashes each tensor"
WHY_OURS = {
    "all_parameter_hash_comparisons": TENSORS,
    "adam_state_comparisons": TENSORS,
    "gradient_hash_comparisons": TENSORS,
    "environment": "what was installed where the report was written; of its packages only those that the readbacks name show up again",
    "experiment_digest": "hashes a configuration that the report doesn't hold; --root has it in params.yaml",
    "experiment": "a name",
    "expected_digest": "may be given or not, as long as it is the result",
    "first_difference": "an element of a file; the text only repeats it, and --root reads the file",
    "reasons": "a file that was gone or damaged when the runs were compared",
    "runs.*.completions": "text, of which the report has no hash; --root has the file",
    "runs.*.execution": "settings that may change no bit; only what decides the number of ranks and of calls shows up again",
    "runs.*.executed_or_cached": "whether something ran here is known from times only, and there are none",
    "runs.*.performance": TIMES,
    "runs.*.tokens": "hashes tokens, and lengths of prompts, which only --root reads",
    "runs.*.validation.file_hashes": TENSORS,
    "runs.*.validation.train_rollout_logprob": "counts of a failed validation",
    "runs.*.validation.cudagraph.reason": "text for people",
    "runs.*.validation.errors": "text of a failed validation",
    "runs.*.validation.runtime_readbacks": "what processes said; --root reads their files",
    "runs.*.validation.runtime_scalar_logprob.evidence_source": "text for people",
    "runs": "where all runs are equal, their order says nothing",
    "token_logprobs": ARRAYS,
    "totals": "counts files that a failed validation may have missed",
    "verification": "who started the stages is not in the report; --root reads the logs",
}
WHY_PUBLISHED = {
    "runs.*.steps.*.train/entropy_loss": "enters the loss with a coefficient of 0",
    "runs.*.steps.*.train/pg_loss": "the sign of a 0 changes no loss",
    "runs.*.steps.*.train/tis_clipfrac": "the bounds of the weight are not in the report",
    "runs.*.performance.*.perf/train_time": "the training block has more than its four parts, and the sum rounds the last digit away",
    "runs.*.performance": TIMES,
    "runs": "where all runs are equal, their order says nothing",
}


def why(label: str, ours: bool) -> str | None:
    """The reason behind a label of `unnoticed`: that of the longest beginning of its place."""
    place = label.partition(": ")[2]
    reasons = WHY_OURS if ours else WHY_PUBLISHED
    found = [known for known in reasons if place == known or place.startswith(f"{known}.")]
    return reasons[max(found, key=len)] if found else None


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The uncovered values, under each reason. Of the places that differ in indices and steps only, the first and last are tried."""
    grouped: dict[str, list[str]] = {}
    for label in unnoticed(report, per_place=2):
        grouped.setdefault(why(label, form.is_ours(report)) or "nothing else in the report depends on it", []).append(label)
    for reason, labels in grouped.items():
        yield f"{reason}:"
        yield from (f"  {label}" for label in labels)

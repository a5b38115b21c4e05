"""All checks of a report by itself, and what it can't show."""

from __future__ import annotations

import contextlib
from typing import Any

from . import form
from .chains import check_chains, check_links, check_totals
from .checks import Checks, Enough
from .comparisons import check_hashes, check_metric_rows, check_norms, check_tokens
from .first_difference import check_difference
from .metrics import check_identities, check_steps
from .performance import check_performance
from .readbacks import check_readbacks
from .samples import check_completions, check_token_logprobs
from .validations import check_validations
from .verdict import check_names, check_verdict

BOTH = (check_steps, check_identities, check_performance, check_validations, check_readbacks, check_tokens, check_norms, check_hashes)
OURS = (
    form.check_conditions, check_names, check_chains, check_links, check_metric_rows, check_totals, check_verdict, check_difference,
    check_completions, check_token_logprobs,
)  # fmt: skip
HASHES = (
    "whether the hashes are those of files that exist: a report can be forged as a whole, every digest computed again; only the run folders"
    " show that (--root, --run)"
)
FILES = (
    "whether the files were computed: a whole project can be forged as well; running it again (verify=fresh) gives the digest or not",
    "whether the tokens have the texts beside them, which takes the tokenizer",
)
CANNOT_KNOW = (
    "whether the times were measured, beyond the sums and ratios between them",
    "whether the kernels that the readbacks name computed the values",
)


def verify(report: Any) -> Checks:
    """All checks of a report. ValueError when it is no comparison report at all."""
    form.check(report)
    return check_values(report)


def check_values(report: dict[str, Any], stop_at_first: bool = False) -> Checks:
    """Every value against the others."""
    checks = Checks(stop_at_first)
    with contextlib.suppress(Enough):
        for check in (*BOTH, *OURS) if form.is_ours(report) else BOTH:
            checks.follow(check.__name__.removeprefix("check_"), check, report, checks)
    return checks

"""What the report concludes: the verdict, its reasons, and who is compared with whom."""

from __future__ import annotations

import re
from typing import Any

from .checks import Checks, alike
from .layouts import ORACLE, degrees, name_of, option_holds

HASH8 = re.compile(r"[0-9a-f]{8}")
PROBLEM = re.compile(r".+ (is missing|cannot be read: .+|has no .+)", re.DOTALL)


def check_names(report: dict[str, Any], checks: Checks) -> None:
    """Labels and layouts follow from the configuration of each run."""
    runs = report["runs"]
    for run in runs:
        place, label, execution = run["run_id"], run["label"], run["execution"]
        checks.equal(f"{place}: label", label, run["run_id"].removeprefix(f"{report['experiment']}-"))
        found = degrees(run["layout"])
        checks.that(found and run["layout"] == name_of(*found), f"{place}: layout", "is no layout's name")
        parts = label.split("-")
        if checks.that(run["layout"] in parts, f"{place}: label", f"does not name the layout {run['layout']}"):
            name, options = parts[: parts.index(run["layout"])], parts[parts.index(run["layout"]) + 1 :]
            checks.that(report["experiment"].startswith("-".join(name)), "experiment", f"is not of the name of {place}")
            for option in options:
                spelled = re.fullmatch(r"[mbts][0-9]+|(no)?pack|r(tp[0-9]+)?(cp[0-9]+)?(dp[0-9]+)|avx2|avx512|scalar", option)
                checks.that(
                    not spelled or HASH8.fullmatch(option) or option_holds(option, execution),
                    f"{place}: label",
                    f"{option} is not its configuration's",
                )
        named = name_of(*(execution["layout"][key] for key in ("tp", "cp", "dp", "zero")))
        checks.equal(f"{place}: execution.layout", named, run["layout"])
    ids = [run["run_id"] for run in runs]
    oracle = next((run["run_id"] for run in runs if run["layout"] == ORACLE), ids[0])
    checks.equal("oracle", report["oracle"], oracle)


def check_verdict(report: dict[str, Any], checks: Checks) -> None:
    runs, digests = report["runs"], [run["result_digest"] for run in report["runs"]]
    expected = report["expected_digest"]
    good = alike(digests) and all(run["validation"]["passed"] for run in runs) and expected in (None, digests[0])
    if good and report["reasons"]:  # what the comparison found and the validation had not: files that changed or vanished since
        good = not all(_is_problem(reason, runs) for reason in report["reasons"])
    checks.equal("verdict", report["verdict"], ("identical" if len(runs) > 1 else "alone") if good else "different")
    checks.equal("result_digest", report["result_digest"], digests[0] if good else None)
    checks.equal("first_difference", report["first_difference"] is None, alike(digests))
    _check_reasons(report, digests, checks)
    if alike(digests):
        for run in runs[1:]:
            for name in ("chain", "steps", "completions", "tokens"):
                checks.equal(f"{run['run_id']}: {name}, as of {runs[0]['run_id']}", run[name], runs[0][name])


def _check_reasons(report: dict[str, Any], digests: list[str], checks: Checks) -> None:
    """All the reasons that follow from the rest of the report, in order; files that the comparison missed come between them."""
    expected: list[str] = [report["first_difference"]["text"]] if report["first_difference"] else []
    for run in report["runs"]:
        expected += _reasons_of(run)
    if not expected and not [reason for reason in report["reasons"] if _is_problem(reason, report["runs"])]:
        if not alike(digests):
            expected.append(f"result digests differ: {', '.join(sorted(set(digests)))}")
        elif report["expected_digest"] not in (None, digests[0]):
            expected.append(f"all runs agree on result digest {digests[0]}, but {report['expected_digest']} is expected")
    rest = [reason for reason in report["reasons"] if reason in expected or not _is_problem(reason, report["runs"])]
    checks.equal("reasons", rest, expected)


def _reasons_of(run: dict[str, Any]) -> list[str]:
    key, v, found = run["run_id"], run["validation"], []
    errors = v["errors"]
    if v["run_id"] != key:
        found.append(f"validation of {key} is that of {v['run_id']}")
    if not v["passed"]:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        found.append(f"validation of {key} failed: {errors[0] if errors else 'no reason given'}{more}")
    seen = v["file_hashes"]["result_digest"]
    if seen != run["result_digest"]:
        found.append(f"files of {key} changed after its validation (result digest {seen[:12]}..., now {run['result_digest'][:12]}...)")
    return found


def _is_problem(reason: str, runs: list[dict[str, Any]]) -> bool:
    """KEY: FILE is missing, cannot be read, or has no ...; and the validation did not say so."""
    for run in runs:
        if reason.startswith(f"{run['run_id']}: "):
            text = reason.removeprefix(f"{run['run_id']}: ")
            return bool(PROBLEM.fullmatch(text)) and text not in run["validation"]["errors"]
    return False

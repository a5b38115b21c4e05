"""python -m pipeline.verify REPORT.json [--coverage]: checks a comparison report without our code's help, a machine of ours, or a GPU.

Only the standard library, and nothing else of this project: the file can be copied and read alone. It takes our own reports and the
published one whose fields they extend. What is checked: every step is there and finite, the arithmetic between fields holds (the identities
of the metrics' definitions), hashes chain up to the result digest, and every claim of equality is what the values beside it say.
`--coverage` changes each value of the report in turn and names those whose change no check notices.

Exit status: 0 consistent, 2 not a report, 3 inconsistent.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SHA256 = re.compile(r"[0-9a-f]{64}")
MISMATCH = "train/train_current_rollout_logprob_mismatch_count"
NUMEL = "train/train_current_rollout_logprob_numel"
CANNOT_KNOW = (
    "whether a hash is that of a file that exists: give the run folder to `python -m pipeline`'s validate and compare stages for that",
    "whether the times were measured, beyond the sums and ratios between them",
    "whether the kernels that the readbacks name computed the values",
)


class Checks:
    """Counts what was compared and keeps what did not hold."""

    def __init__(self) -> None:
        self.count, self.faults = 0, []

    def that(self, holds: Any, place: str, fault: str) -> None:
        self.count += 1
        if not holds:
            self.faults.append(f"{place}: {fault}")

    def equal(self, place: str, value: Any, expected: Any) -> None:
        self.that(type(value) is type(expected) and value == expected, place, f"is {_short(value)}, expected {_short(expected)}")


def verify(report: Any) -> Checks:
    """All checks of a report. ValueError when it is no comparison report at all."""
    if not isinstance(report, dict) or not isinstance(report.get("runs"), list) or not report["runs"]:
        raise ValueError("not a comparison report: there is no list `runs`")
    checks = Checks()
    for check in (check_completeness, check_metrics, check_performance, check_validations, check_comparisons, check_chains, check_verdict):
        try:
            check(report, checks)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            checks.that(
                False, check.__name__.removeprefix("check_"), f"a field is missing or of another type ({type(error).__name__}: {error})"
            )
    return checks


# --- what is there -----------------------------------------------------------------------------------------------------------
def check_completeness(report: dict, checks: Checks) -> None:
    runs = report["runs"]
    names = [run["run_id"] for run in runs]
    checks.that(len(set(names)) == len(names), "runs", "two runs have the same run_id")
    steps = [str(i) for i in range(len(runs[0]["steps"]))]
    checks.that(steps, "runs", "no steps")
    for run in runs:
        for section in ("steps", "performance", "tokens"):
            place = f"{run['run_id']}.{section}"
            own = runs[0] if section == "steps" else run
            expected = steps if section == "steps" or len(own[section]) == len(steps) else [str(i) for i in range(len(runs[0][section]))]
            checks.equal(place, list(run[section]), expected)
            for key, row in run[section].items():
                checks.equal(f"{place}.{key}", sorted(row), sorted(runs[0][section][key]))
                for name, value in row.items():
                    if isinstance(value, float | int):
                        checks.that(math.isfinite(value), f"{place}.{key}.{name}", f"{value} is not finite")
        for key, row in run["tokens"].items():
            checks.that(SHA256.fullmatch(row["sha256"]), f"{run['run_id']}.tokens.{key}.sha256", "is no sha256")
            checks.that(0 < row["sample_count"] <= row["token_count"], f"{run['run_id']}.tokens.{key}", "counts are impossible")


# --- arithmetic between fields -----------------------------------------------------------------------------------------------
def check_metrics(report: dict, checks: Checks) -> None:
    """loss = pg_loss - c_entropy * entropy + c_kl * kl, by the coefficients of the experiment or else those that fit every step."""
    entropy_coef, kl_coef = _coefficients(report)
    for run in report["runs"]:
        for key, m in run["steps"].items():
            place = f"{run['run_id']}.steps.{key}"
            checks.that(m["train/step"] == int(key), f"{place}.train/step", f"is {m['train/step']}, expected {key}")
            loss = fp32(m["train/pg_loss"] - fp32(entropy_coef) * m["train/entropy_loss"] + fp32(kl_coef) * m["train/kl_loss"])
            checks.that(loss == m["train/loss"], f"{place}.train/loss", f"is {m['train/loss']}, its parts give {loss}")
            for name, value in m.items():
                if name.startswith("train/") and not name.startswith(("train/lr-", "train/step", "train/grad_norm")):
                    checks.that(fp32(value) == value, f"{place}.{name}", f"{value} is no fp32 number")
            for name in ("train/pg_clipfrac", "train/tis_clipfrac", "rollout/frac_zero_std", "rollout/truncated_frac"):
                checks.that(0 <= m.get(name, 0) <= 1, f"{place}.{name}", "is no fraction")
            checks.that(0 <= m[MISMATCH] <= m[NUMEL], f"{place}.{MISMATCH}", "is above the number of tokens")
            differ = m["train/train_current_rollout_logprob_max_abs_diff"] > 0
            checks.that(m[MISMATCH] > 0 or not differ, f"{place}.{MISMATCH}", "is 0 although logprobs differ")
            if m[MISMATCH] == 0:  # current = rollout: what is computed from both must say so
                checks.equal(f"{place}.ois against tis", m["train/ois"], m["train/tis"])
                checks.equal(f"{place}.train/ppo_kl", abs(m["train/ppo_kl"]) > 0, m["train/train_rollout_logprob_abs_diff"] > 0)


def _coefficients(report: dict) -> tuple[float, float]:
    """(entropy, KL) coefficients: recorded with the experiment, else 0 and the ratio of the first step with a KL, to two digits."""
    recorded = report.get("objective") or {}
    if "kl_coef" in recorded:
        return recorded["entropy_coef"], recorded["kl_coef"]
    for m in report["runs"][0]["steps"].values():
        if m["train/kl_loss"]:
            return 0.0, float(f"{(m['train/loss'] - m['train/pg_loss']) / m['train/kl_loss']:.2g}")
    return 0.0, 0.0


def check_performance(report: dict, checks: Checks) -> None:
    for run in report["runs"]:
        for key, p in run["performance"].items():
            place = f"{run['run_id']}.performance.{key}"
            perf = {name.removeprefix("perf/"): value for name, value in p.items()}
            if perf.get("step_time") is None:
                checks.that(perf.get("reason"), place, "no times, and no reason given")
                continue
            _close(checks, f"{place}.step_time", perf["step_time"], perf["train_wait_time"] + perf["train_time"])
            _close(checks, f"{place}.wait_time_ratio", perf["wait_time_ratio"], perf["train_wait_time"] / perf["step_time"])
            tokens = run["tokens"][key]["token_count"]
            _close(checks, f"{place}.actor_train_tok_per_s", perf["actor_train_tok_per_s"], tokens / perf["actor_train_time"])
            work = perf["log_probs_tflops"] * perf["log_probs_time"]
            _close(checks, f"{place}.ref_log_probs_tflops", perf["ref_log_probs_tflops"] * perf["ref_log_probs_time"], work)
            _close(checks, f"{place}.actor_train_tflops", perf["actor_train_tflops"] * perf["actor_train_time"], 3 * work)
            parts = sum(perf[name] for name in ("log_probs_time", "actor_train_time"))
            checks.that(
                parts <= perf["train_time"] * 1.001 or perf["train_wait_time"] > 0, f"{place}.train_time", "is shorter than its parts"
            )


# --- claims against the values beside them -----------------------------------------------------------------------------------
def check_validations(report: dict, checks: Checks) -> None:
    for run in report["runs"]:
        v, place = run["validation"], f"{run['run_id']}.validation"
        checks.equal(f"{place}.run_id", v["run_id"], run["run_id"])
        parts = [v["runtime_readbacks"], v["runtime_scalar_logprob"], v["train_rollout_logprob"]]
        clean = not v["errors"] and all(part["passed"] and not part["errors"] for part in parts)
        checks.equal(f"{place}.passed", v["passed"], clean)
        for name, part in zip(("runtime_readbacks", "runtime_scalar_logprob", "train_rollout_logprob"), parts):
            checks.equal(f"{place}.{name}.passed", part["passed"], not part["errors"])
        graph = v["cudagraph"]
        if "applicable" in graph:
            checks.that(
                graph["applicable"] is False and graph["reason"] and "passed" not in graph, f"{place}.cudagraph", "claims what it isn't"
            )
        else:
            checks.equal(f"{place}.cudagraph.passed", graph["passed"], all(value is True for value in graph["checks"].values()))
            checks.equal(
                f"{place}.cudagraph.expected_capture_sizes", graph["expected_capture_sizes"], sorted(set(graph["expected_capture_sizes"]))
            )
        _check_modules(v["runtime_readbacks"]["frameworks"], f"{place}.runtime_readbacks", checks)
        _check_rows(run, v, place, checks)


def _check_modules(frameworks: dict, place: str, checks: Checks) -> None:
    checks.that(frameworks, place, "no framework reported anything")
    for framework, section in frameworks.items():
        for module, m in section["modules"].items():
            where = f"{place}.{framework}.{module}"
            checks.that(len(m["backend_ids"]) == 1 and m["call_count"] > 0, where, "ran several backends, or none")
            checks.equal(f"{where}.implementations", m["implementations"], [m["expected_implementation"]])
            checks.that(0 < m["installed_processes"] <= section["readback_count"], where, "more processes than readbacks")
        cases = {m["case_id"] for m in section["modules"].values()}
        checks.that(len(cases) == 1, f"{place}.{framework}", f"modules of several cases: {sorted(cases)}")


def _check_rows(run: dict, v: dict, place: str, checks: Checks) -> None:
    """Counts of tokens and mismatches, from the metrics of each step up to the totals."""
    scalar, logprob = v["runtime_scalar_logprob"], v["train_rollout_logprob"]
    checks.equal(f"{place}.runtime_scalar_logprob.rows", [row["step"] for row in scalar["rows"]], [int(key) for key in run["steps"]])
    published = "chain" not in run  # its metrics are means over samples; ours are counts
    for row in scalar["rows"]:
        m, where = run["steps"][str(row["step"])], f"{place}.runtime_scalar_logprob.rows.{row['step']}"
        size, factor = m["train/global_batch_size"], m["train/global_batch_size"] if published else 1
        for name, total, metric in (
            ("active_tokens", "active_token_count", NUMEL),
            ("mismatch_count", "bitwise_mismatch_count", MISMATCH),
        ):
            checks.equal(f"{where}.{total}", row[total], float(m[metric] * factor))
            mean = next(value for field, value in row.items() if field.endswith(f"mean_{name}_per_sample"))
            checks.equal(f"{where}.{name} per sample", mean, row[total] / size)
        checks.equal(f"{where}.max_abs_dlogp", row["max_abs_dlogp"], m["train/train_current_rollout_logprob_max_abs_diff"])
        checks.equal(f"{where}.mean_abs_dlogp", row["mean_abs_dlogp"], m["train/train_rollout_logprob_abs_diff"])
    exposure = sum(row["active_token_count"] for row in scalar["rows"])
    checks.equal(f"{place}.total_active_token_exposure", scalar["total_active_token_exposure"], exposure)
    mismatches = sum(row["bitwise_mismatch_count"] for row in scalar["rows"])
    checks.equal(f"{place}.bitwise_zero", scalar["bitwise_zero"], mismatches == 0)
    where = f"{place}.train_rollout_logprob"
    checks.equal(f"{where}.element_count", logprob["element_count"], int(exposure))
    checks.equal(f"{where}.sample_count", logprob["sample_count"], sum(row["sample_count"] for row in run["tokens"].values()))
    for flag in ("bitwise_equal", "torch_equal"):
        checks.equal(f"{where}.{flag}", logprob[flag], logprob["bitwise_mismatch_count"] == 0)
    for name in ("mismatch_count", "max_abs_diff", "mismatch_kl", "mismatch_k3_kl", "train_rollout_logprob_abs_diff"):
        checks.that(logprob["bitwise_mismatch_count"] or logprob[name] == 0, f"{where}.{name}", "is not 0 although all bits are equal")
    offline = v["offline_tensor_comparison"]
    artifacts = logprob["artifacts"]
    checks.that(len(set(artifacts)) == len(artifacts), f"{where}.artifacts", "a file is named twice")
    for name in ("artifact_count", "comparable_artifact_count"):
        checks.equal(f"{place}.offline_tensor_comparison.{name}", offline[name], len(artifacts))


def check_comparisons(report: dict, checks: Checks) -> None:
    runs = report["runs"]
    tokens = [[row["sha256"] for row in run["tokens"].values()] for run in runs]
    checks.equal("tokens_equal", report["tokens_equal"], _same(tokens))
    for i, row in enumerate(report["gradient_norm_comparisons"]):
        place, key = f"gradient_norm_comparisons.{i}", str(row["step"])
        norms = [run["steps"][key]["train/grad_norm"] for run in runs]
        checks.equal(f"{place}.norms", row["norms"], norms)
        checks.equal(f"{place}.exactly_equal", row["exactly_equal"], _same(norms))
        checks.that(
            (row["relative_difference_percent"] == 0) == _same(norms), f"{place}.relative_difference_percent", "contradicts the norms"
        )
        if "hex" in row:
            checks.equal(f"{place}.hex", [float.fromhex(x) for x in row["hex"]], norms)
    steps = [row["step"] for row in report["gradient_norm_comparisons"]]
    checks.equal("gradient_norm_comparisons", steps, list(range(len(runs[0]["steps"]))))
    for name, flag in (
        ("all_parameter_hash_comparisons", "unequal_parameter_tensors"),
        ("gradient_hash_comparisons", "unequal_gradient_tensors"),
    ):
        for i, row in enumerate(report.get(name, [])):
            _check_hashes(row, flag, f"{name}.{i}", len(runs), checks)
    for i, row in enumerate(report.get("adam_state_comparisons", [])):
        moments = [row["exp_avg"], row["exp_avg_sq"]]
        for name, moment in zip(("exp_avg", "exp_avg_sq"), moments):
            _check_hashes(moment, "unequal_tensors", f"adam_state_comparisons.{i}.{name}", len(runs), checks)
        checks.equal(f"adam_state_comparisons.{i}.bitwise_equal", row["bitwise_equal"], all(m["bitwise_equal"] for m in moments))
    versions = [row["version"] for row in report["all_parameter_hash_comparisons"]]
    checks.equal("all_parameter_hash_comparisons", versions, [f"weight_v{i:06d}" for i in range(1, len(versions) + 1)])
    counts = {row["tensor_count"] for row in report["all_parameter_hash_comparisons"]}
    checks.that(len(counts) == 1 and min(counts) > 0, "all_parameter_hash_comparisons", f"numbers of tensors differ: {sorted(counts)}")


def _check_hashes(row: dict, unequal: str, place: str, num_runs: int, checks: Checks) -> None:
    hashes = row["sha256"]
    checks.equal(f"{place}.sha256", len(hashes), num_runs)
    checks.that(all(isinstance(h, str) and SHA256.fullmatch(h) for h in hashes), f"{place}.sha256", "holds what is no sha256")
    checks.equal(f"{place}.bitwise_equal", row["bitwise_equal"], _same(hashes))
    checks.equal(f"{place}.{unequal}", not row[unequal], _same(hashes))


# --- the hash chain: ours only -----------------------------------------------------------------------------------------------
def check_chains(report: dict, checks: Checks) -> None:
    for i, run in enumerate(report["runs"]):
        previous = None
        for element in run.get("chain", []):
            place = f"{run['run_id']}.chain.{element['iteration']}"
            body = {key: value for key, value in element.items() if key != "digest"}
            text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            checks.equal(f"{place}.digest", element["digest"], hashlib.sha256(text.encode()).hexdigest())
            checks.equal(f"{place}.previous", element["previous"], previous)
            previous = element["digest"]
        if "chain" in run:
            checks.equal(f"{run['run_id']}.result_digest", run["result_digest"], previous)
            checks.equal(f"{run['run_id']}.validation.file_hashes", run["validation"]["file_hashes"]["result_digest"], previous)
            _check_links(report, run, i, checks)


def _check_links(report: dict, run: dict, i: int, checks: Checks) -> None:
    """The hashes of the comparison's sections are those of the run's chain."""
    chain = {element["iteration"]: element for element in run["chain"]}
    checks.equal(f"{run['run_id']}.chain", list(chain), list(range(len(chain))))
    for iteration, row in enumerate(report["all_parameter_hash_comparisons"]):
        checks.equal(f"{run['run_id']}: weights {row['version']}", row["sha256"][i], chain[iteration]["quantities"]["weights"])
    for row in report["gradient_hash_comparisons"]:
        link = chain[row["iteration"]]["steps"][str(row["step"])]["gradients"]
        checks.equal(f"{run['run_id']}: gradients of step {row['step']}", row["sha256"][i], link)
    for iteration, row in enumerate(report["adam_state_comparisons"], 1):
        for name in ("exp_avg", "exp_avg_sq"):
            checks.equal(f"{run['run_id']}: {name} {row['version']}", row[name]["sha256"][i], chain[iteration]["quantities"][name])
    for row in report["logprob_comparisons"]:
        for name, quantity in row["quantities"].items():
            checks.equal(f"{run['run_id']}: {name} {row['iteration']}", quantity["sha256"][i], chain[row["iteration"]]["quantities"][name])
            checks.equal(f"logprob_comparisons.{row['iteration']}.{name}", quantity["bitwise_equal"], _same(quantity["sha256"]))
        checks.equal(
            f"logprob_comparisons.{row['iteration']}", row["bitwise_equal"], all(q["bitwise_equal"] for q in row["quantities"].values())
        )


def check_verdict(report: dict, checks: Checks) -> None:
    """What the report concludes from its own comparisons."""
    if "verdict" not in report:
        return
    runs, digests = report["runs"], [run["result_digest"] for run in report["runs"]]
    good = _same(digests) and all(run["validation"]["passed"] for run in runs) and not report["reasons"]
    checks.equal("verdict", report["verdict"], ("identical" if len(runs) > 1 else "alone") if good else "different")
    checks.equal("result_digest", report["result_digest"], digests[0] if good else None)
    checks.that((report["first_difference"] is None) == _same(digests), "first_difference", "contradicts the result digests")
    checks.that(report["oracle"] in [run["run_id"] for run in runs], "oracle", "is not one of the runs")
    if report["expected_digest"] is not None and good:
        checks.equal("expected_digest", report["expected_digest"], digests[0])
    if _same(digests):
        for run in runs[1:]:
            checks.equal(f"{run['run_id']}.steps", run["steps"], runs[0]["steps"])
            checks.equal(f"{run['run_id']}.completions", run["completions"], runs[0]["completions"])
    for row in report["metric_comparisons"]:
        checks.equal("metric_comparisons", row["bitwise_equal"], not row["unequal_metrics"])


# --- small things ------------------------------------------------------------------------------------------------------------
def fp32(x: float) -> float:
    """Rounded to the nearest fp32 number."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def _same(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def _close(checks: Checks, place: str, value: float, expected: float) -> None:
    """Equal but for the rounding of a few fp64 operations."""
    checks.that(math.isclose(value, expected, rel_tol=1e-9), place, f"is {value}, its parts give {expected}")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 100 else f"{text[:97]}..."


# --- what no check covers ----------------------------------------------------------------------------------------------------
def uncovered(report: dict) -> Iterator[str]:
    """Paths of the values whose change, one at a time, no check notices; runs and steps as *."""
    for path in _leaves(report):
        doctored = copy.deepcopy(report)
        node = doctored
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = _changed(node[path[-1]])
        if not verify(doctored).faults:
            yield ".".join("*" if isinstance(key, int) or key.isdigit() else key for key in path)


def _leaves(node: Any, path: tuple = ()) -> Iterator[tuple]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else None
    if items is None:
        yield path
    else:
        for key, value in items:
            yield from _leaves(value, (*path, key))


def _changed(value: Any) -> Any:
    """Another value of the same type: one digit of a number, one character of a text."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return float(f"{value * 1.001 or 0.001:.17g}")
        case str():
            return (("1" if value[0] != "1" else "2") + value[1:]) if value else "1"
        case _:
            return "1"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.verify", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--coverage", action="store_true", help="name the values that no check covers")
    args = parser.parse_args(argv)
    try:
        report = json.loads(args.report.read_text(encoding="utf-8"))
        checks = verify(report)
    except (OSError, ValueError) as error:
        print(f"error: {args.report}: {error}; give the JSON of a comparison", file=sys.stderr)
        return 2
    for fault in checks.faults:
        print(f"inconsistent: {fault}")
    if checks.faults:
        return 3
    print(f"consistent: {len(report['runs'])} runs, {len(report['runs'][0]['steps'])} steps, {checks.count} checks")
    print("what a report cannot show:", *(f"  {line}" for line in CANNOT_KNOW), sep="\n")
    if args.coverage:
        print("values that no check covers:", *(f"  {path}" for path in dict.fromkeys(uncovered(report))), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Every value of a report changed, every element dropped and every two neighbours swapped, one at a time: refused, or listed below."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
from published_report import published_report
from verified_runs import make_project, report_of

from pipeline.verify import coverage, doctoring
from pipeline.verify.folder_checks import check_project
from pipeline.verify.report import verify

OURS = {
    "element added: environment.devices",
    "changed: environment.devices.*",
    "changed: environment.machine",
    "field dropped: environment.packages",
    "field added: environment.packages",
    "changed: environment.packages.gguf",
    "changed: environment.python",
    "changed: experiment_digest",
    "neighbours swapped: runs",
    "changed: runs.*.execution.launch.hostfile",
    "changed: runs.*.execution.launch.idle_seconds",
    "changed: runs.*.execution.launch.kernel_build",
    "changed: runs.*.execution.launch.launcher",
    "changed: runs.*.execution.launch.nodes",
    "changed: runs.*.execution.launch.rendezvous",
    "changed: runs.*.execution.launch.segment",
    "changed: runs.*.execution.launch.threads",
    "changed: runs.*.execution.launch.timeout_seconds",
    "changed: runs.*.execution.layout.micro_batch",
    "changed: runs.*.execution.layout.rollout.batch_size",
    "changed: runs.*.execution.layout.rollout.dp",
    "changed: runs.*.execution.layout.rollout.tp",
    "changed: runs.*.execution.tracking.enabled",
    "changed: runs.*.execution.tracking.experiment",
    "changed: runs.*.execution.tracking.strict",
    "changed: runs.*.execution.tracking.uri",
    "changed: runs.*.execution.verify",
    "changed: runs.*.performance.*.perf/rollout_time",
    "changed: runs.*.performance.*.perf/update_weights_time",
    "changed: runs.*.validation.cudagraph.reason",
    "changed: token_logprobs.*.prompt",
    "neighbours swapped: token_logprobs.*.tokens",
    "changed: token_logprobs.*.tokens.*.id",
    "changed: token_logprobs.*.tokens.*.reference",
    "changed: token_logprobs.*.tokens.*.text",
    "changed: verification",
}
# What the files can't show either: an order that says nothing, what one command was asked for, texts for people and texts of tokens.
OURS_WITH_FILES = {
    "neighbours swapped: runs",
    "changed: runs.*.execution.verify",
    "changed: runs.*.validation.cudagraph.reason",
    "changed: token_logprobs.*.prompt",
    "changed: token_logprobs.*.tokens.*.text",
}
PUBLISHED = {
    "neighbours swapped: runs",
    "changed: runs.*.performance.*.perf/data_preprocess_time",
    "changed: runs.*.performance.*.perf/train_time",
    "changed: runs.*.performance.*.perf/update_weights_time",
    "changed: runs.*.steps.*.train/entropy_loss",
    "changed: runs.*.steps.*.train/pg_loss",
    "changed: runs.*.steps.*.train/tis_clipfrac",
}


JUNK = (None, True, -1, 2**62, 1.5, -0.0, 1e308, "", "x", "NaN", [], {}, [1], [[]], {"a": 1}, {"perf/step_time": None})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    synthetic = make_project(tmp_path_factory.mktemp("coverage"))
    return synthetic.paths.root, report_of(synthetic)


def test_of_our_report_everything_else_is_covered_and_the_files_show_most_of_the_rest(made):
    root, report = made
    untouched = copy.deepcopy(report)
    escapes = list(doctoring.escapes(report))
    assert report == untouched
    assert {label for label, *_ in escapes} == OURS
    unknown = set()
    for label, parent, key, value in escapes:
        before, parent[key] = parent[key], value
        checks = verify(report)
        assert not checks.faults
        check_project(report, root, checks)
        unknown |= set() if checks.faults else {label}
        parent[key] = before
    assert unknown == OURS_WITH_FILES


def test_of_the_published_report_everything_else_is_covered():
    report = published_report()
    assert verify(report).faults == []
    assert set(doctoring.unnoticed(report)) == PUBLISHED
    assert report == published_report()


def test_no_doctored_copy_ends_in_a_traceback(made):
    """All faults are looked for, as the command does, with junk of every type in every kind of place."""
    report, random, places = copy.deepcopy(made[1]), np.random.default_rng(0), {}
    for path in list(doctoring.paths_of(report))[1:]:
        places.setdefault(doctoring.pattern(path), path)
    for path in places.values():
        parent = report
        for key in path[:-1]:
            parent = parent[key]
        before = parent[path[-1]]
        for i in random.choice(len(JUNK), 2, replace=False):
            parent[path[-1]] = JUNK[i]
            with contextlib.suppress(ValueError):  # no report at all
                verify(report)
        parent[path[-1]] = before
    assert report == made[1]


def test_every_uncovered_value_has_its_reason():
    for labels, ours in ((OURS, True), (PUBLISHED, False)):
        assert [label for label in labels if coverage.why(label, ours) is None] == []


def test_the_command_prints_them_under_their_reasons():
    lines = list(coverage.lines(published_report()))
    assert {line.strip() for line in lines if line.startswith("  ")} == PUBLISHED
    assert all(line.endswith(":") for line in lines if not line.startswith("  "))
    assert not any("nothing else in the report" in line for line in lines)


def test_doctoring_tries_what_it_says():
    """The test of the test: on a report of one list and one object, every kind of change is there."""
    report = {"a": [1.25, 2.0], "b": {"c": "cached", "d": None}}
    done = [
        (kind, doctoring.pattern(path), value)
        for path in ((), ("a",), ("a", 0), ("b",), ("b", "c"), ("b", "d"))
        for kind, _, _, value in doctoring.doctorings(report, path)
    ]
    assert {(kind, place) for kind, place, _ in done} == {
        ("field dropped", "report"), ("field added", "report"), ("field dropped", "b"), ("field added", "b"), ("element dropped", "a"),
        ("element added", "a"), ("neighbours swapped", "a"), ("changed", "a.*"), ("changed", "b.c"), ("changed", "b.d"),
    }  # fmt: skip
    assert [value for _, place, value in done if place == "a.*"] == [2.25, 1.26, -1.25, 1, None]
    assert [value for _, place, value in done if place == "b.c"] == ["fresh", "executed", "1ached", "cache1", "", None]
    assert [value for kind, place, value in done if place == "a" and kind == "neighbours swapped"] == [[2.0, 1.25]]

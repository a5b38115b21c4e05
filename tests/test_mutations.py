"""The checker can fail: whatever is broken is found and named; and the suite that shows it can fail, too."""

from __future__ import annotations

import pytest

from tests.mutations import __main__ as suite
from tests.mutations import evidence_files, files
from tests.mutations.cache import CASES, cache_outcome
from tests.mutations.clone import Clone
from tests.mutations.mutation import named
from tests.mutations.outcomes import outcomes
from tests.mutations.runs import ROOT, synthetic_runs
from tests.mutations.sources import PATCHES, source_outcome
from tests.mutations.sweep import sweep
from tests.mutations.verdicts import Expected, Found, fault_of
from tests.working_copy import replaced_once

NAMED = [*files.MUTATIONS, *evidence_files.MUTATIONS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return synthetic_runs(tmp_path_factory.mktemp("runs"))


def not_found(results):
    own = list(results)
    assert own
    return [(outcome.name, outcome.fault, outcome.expected, outcome.found) for outcome in own if outcome.fault]


def test_every_value_and_every_file_of_a_run_is_guarded(runs):
    assert not_found(suite.file_outcomes(runs, thorough=False)) == []


def test_tensor_parallel_ranks_and_several_updates_are_guarded_too(tmp_path):
    runs = synthetic_runs(tmp_path, "tp2", num_updates=2)
    assert not_found(outcomes(runs, sweep(runs, thorough=False), "")) == []


@pytest.mark.slow
def test_the_stages_write_their_reports_of_every_named_fault(runs):
    assert not_found(outcomes(runs, NAMED, "", by_stages=True)) == []


def test_names_are_unique():
    names = [mutation.name for mutation in (*NAMED, *PATCHES, *CASES)]
    assert len(set(names)) == len(names)


# --- the suite itself can fail ----------------------------------------------------------------------------------------------------
def test_a_mutation_that_changes_nothing_survives(runs, monkeypatch, capsys):
    survivor = named("nothing", lambda runs: Expected({"iteration": 1, "quantity": "weights"}))
    monkeypatch.setattr(suite, "real_runs", lambda *_: None)
    monkeypatch.setattr(suite, "NAMED", [survivor])
    assert suite.main(["--files", "--only", "nothing"]) == 1
    said = capsys.readouterr()
    assert said.out.endswith("0 of 1 found\n") and "nothing: survived: the checker says identical" in said.err
    assert suite.main(["--files", "--only", "no such name"]) == 2


MISNAMED = {
    "iteration": Expected({"iteration": 2, "quantity": "weights", "tensor": "x", "index": [3]}),
    "quantity": Expected({"iteration": 1, "quantity": "exp_avg", "tensor": "x", "index": [3]}),
    "tensor": Expected({"iteration": 1, "quantity": "weights", "tensor": "y", "index": [3]}),
    "index": Expected({"iteration": 1, "quantity": "weights", "tensor": "x", "index": [4]}),
    "reason": Expected({"iteration": 1, "quantity": "weights"}, "rank00001.json"),
    "a stored result": Expected(reason="rank00000.json"),
}


@pytest.mark.parametrize("what", MISNAMED)
def test_another_name_than_expected_is_not_found(what):
    place = {"iteration": 1, "quantity": "weights", "tensor": "x", "index": [3], "runs": ["a", "b"]}
    found = Found("different", place, ["rank00000.json"])
    assert fault_of(Expected({**place}, "rank00000.json"), found, "a", "b") == ""
    fault = fault_of(MISNAMED[what], found, "a", "b")
    assert fault.startswith("misnamed: ") and what in fault
    assert "runs are" in fault_of(Expected(place), found, "a", "c")


def test_a_mutation_without_a_name_is_refused():
    with pytest.raises(ValueError, match="must be named"):
        Expected()


# --- source code ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_patches_fit_the_source(patch):
    assert replaced_once((ROOT / patch.file).read_text(), patch.old, patch.new, patch.file)


def test_a_patch_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="occurs 2 times, expected once"):
        replaced_once("x\nx\n", "x\n", "y\n", "file")


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return Clone(tmp_path_factory.mktemp("mutations"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_damaged_object_of_the_cache_is_found(clone, case):
    assert not_found([cache_outcome(clone, case)]) == []


@pytest.mark.slow
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_broken_code_is_found(clone, patch):
    assert not_found([source_outcome(clone, patch)]) == []

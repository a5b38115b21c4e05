"""The benchmark's arithmetic and its table; every pair of thunks runs, at the tiny model's shapes."""

from __future__ import annotations

import importlib
import time

import pytest

from kernels.bench import __main__ as bench
from kernels.bench import shapes
from kernels.bench.timing import Case, Clock, Row, geometric_mean, time_case


def case(ours=lambda: None, theirs=lambda: None, target=1.0) -> Case:
    return Case("linear forward", "tiny", "M=1", ours, theirs, target)


def test_a_side_that_takes_three_times_as_long_has_ratio_three():
    row = time_case(case(lambda: time.sleep(0.006), lambda: time.sleep(0.002)), Clock("cpu"), 1, rounds=3)
    assert 2.0 < row.median < 4.0
    assert not row.met
    assert row.record()["ratio"]["rounds"] == 3


def test_rounds_alternate_which_side_goes_first():
    calls: list[str] = []
    time_case(case(lambda: calls.append("ours"), lambda: calls.append("theirs")), Clock("cpu"), 1, rounds=2, least=0.0)
    assert calls[4:] == ["ours", "theirs", "theirs", "ours"]  # after two warm-up calls of each


def test_the_tables_name_every_missed_target():
    rows = [Row(case(target=1.5), 1, [1.0, 1.2, 9.0], 1.0, 1.0, 0.5), Row(case(target=1.5), 1, [1.9, 2.0, 2.1], 2.0, 1.0, 0.5)]
    lines = bench.table(rows)
    assert ["MISSED" in line for line in lines[2:]] == [False, True]
    assert "4.0" in lines[3], "ours / floor"
    summary = bench.means(rows)[2]
    assert "1 of 2" in summary and f"{geometric_mean([1.2, 2.0]):.2f}" in summary and "MISSED" in summary


@pytest.mark.parametrize("op", bench.OPS)
def test_both_sides_of_every_case_run(op, monkeypatch):
    module = importlib.import_module(f"kernels.bench.{op}")
    monkeypatch.setattr(module, "models", lambda device: [shapes.TINY])
    count = 0
    for pair in module.cases("cpu", True):
        pair.ours()
        pair.theirs()
        count += 1
    assert count


def test_an_unknown_op_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as raised:
        bench.main(["liner"])
    assert raised.value.code == 2
    assert "liner: no such op" in capsys.readouterr().err

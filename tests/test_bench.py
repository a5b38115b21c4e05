"""The benchmark's arithmetic and its table; every pair of thunks runs, at the tiny model's shapes."""

from __future__ import annotations

import importlib

import pytest

from kernels.bench import __main__ as bench
from kernels.bench import shapes
from kernels.bench.rates import Rates
from kernels.bench.timing import Case, Clock, Row, geometric_mean, time_case
from stages import bench as whole


def case(ours=lambda: None, theirs=lambda: None, target=1.0) -> Case:
    return Case("linear forward", "tiny", "M=1", ours, theirs, target)


def test_a_side_that_takes_three_times_as_long_has_ratio_three():
    class Stated(Clock):
        def seconds(self, thunk, repeat):  # a busy machine's sleep would be of any length
            return thunk()

    row = time_case(case(lambda: 0.006, lambda: 0.002), Stated("cpu"), 1, rounds=3)
    assert row.median == pytest.approx(3.0)
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


def test_more_tokens_per_second_are_better_and_more_seconds_are_worse(monkeypatch):
    monkeypatch.setattr(whole, "Side", lambda *args: None)
    monkeypatch.setattr(whole, "take_turns", lambda rounds, ours, theirs: ([1.0, 1.0, 9.0], [1.2, 1.2, 1.2]))
    met = {r["name"]: r["met"] for r in whole.measured(["step", "generate"], 2, 3)}
    assert met == {"step": True, "generate, 1 sequences": True, "generate, 8 sequences": False, "generate, 32 sequences": False}
    monkeypatch.setattr(whole, "take_turns", lambda rounds, ours, theirs: ([1.3], [1.0]))
    assert not any(r["met"] for r in whole.measured(["step", "rollout", "generate"], 2, 3))


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


def test_the_floor_is_the_slower_of_arithmetic_and_memory():
    machine = Rates(flops=10.0, bytes=2.0)
    assert machine.floor(30.0, 2.0) == 3.0
    assert machine.floor(30.0, 8.0) == 4.0


def test_an_unknown_op_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as raised:
        bench.main(["liner"])
    assert raised.value.code == 2
    assert "liner: no such op" in capsys.readouterr().err

"""Rewards are pure functions: exact in fp32, and different within a group even for an untrained model."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from pipeline.errors import UserError
from stages.rewards import dense, is_costly, reward


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("17 + 25 = 42.", "42", 1.0),
        ("The answer is 1,024", "1024", 1.0),
        ("42.0", "42", 1.0),
        ("first 42, then 43", "42", 0.0),
        ("5-3=2, so -2", "-2", 1.0),
        ("8-5", "5", 1.0),
        ("1,2,3", "3", 1.0),
        (" Paris\n", "Paris", 1.0),
        ("It is Paris", "Paris", 0.0),
        ("no number", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_exact_compares_the_last_number(text: str, answer: str, expected: float) -> None:
    assert reward("exact", text, [], answer) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("The answer is 42.", "42", 1.0),
        (r"so $\frac{1}{2}$", "0.5", 1.0),
        (r"\boxed{1,024}", "1024", 1.0),
        (r"$1/3$", r"\frac13", 1.0),
        ("It costs 18 dollars", "18", 1.0),
        ("It costs 19 dollars", "18", 0.0),
        ("no idea", "18", 0.0),
    ],
)
def test_math_verify_compares_values(text: str, answer: str, expected: float) -> None:
    assert reward("math_verify", text, [], answer) == expected


def test_math_verify_uses_no_signals() -> None:
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(reward("math_verify", "it is 42", [], "42")))
    thread.start()
    thread.join()
    assert results == [1.0]


@pytest.mark.parametrize(
    "text", ["9^{9^{9}}", "2**9**9", "(2^9)^9", "10^{1000}", "2^99 x^99", "99999!", r"\prod_{i=1}^{9} i", "7" * 40, "2^{99999/3}"]
)
def test_mathematics_without_a_bound_is_never_evaluated(text: str) -> None:
    assert is_costly(text)
    assert reward("math_verify", text, [], "1") == 0.0


@pytest.mark.parametrize("text", ["x^2 + 1 = 5", r"\boxed{\frac{3}{4}} cm^2", "2^{10} = 1024", "n^{k+1}", "Great! It is 3", "a != b"])
def test_ordinary_mathematics_is_read(text: str) -> None:
    assert not is_costly(text)


def test_dense_grows_with_what_we_want() -> None:
    assert dense("", 0, "42") == 0.0
    assert (
        dense("aaaa", 4, "42")
        < dense("a7aa", 4, "42")
        < dense("77aa", 4, "42")
        < dense("47aa", 4, "42")
        < dense("42aa", 4, "42")
        < dense("42", 4, "42")
    )
    assert dense("42", 64, "42") < dense("42", 1, "42") < 1.0


def test_rewards_are_fp32_values() -> None:
    for kind in ("exact", "math_verify", "dense"):
        value = reward(kind, "x4y2z", [1, 2, 3], "42")
        assert float(np.float32(value)) == value
    assert dense("a1b", 3, "42") == float(np.float32((4 * 1 * 2 * 64 + 61 * 3 * 2) / (8 * 3 * 2 * 64)))


def test_dense_separates_the_samples_of_an_untrained_model() -> None:
    """Uniform bytes, 32 a response: groups of four nearly always have different rewards, so GRPO has an advantage to learn from."""
    source = random.Random(0)
    groups = [
        [dense(bytes(source.randrange(256) for _ in range(32)).decode("utf-8", "replace"), 32, "42") for _ in range(4)] for _ in range(50)
    ]
    assert sum(np.std(group) > 0.005 for group in groups) >= 45


def test_unknown_kind_names_the_key() -> None:
    with pytest.raises(UserError, match="data.reward=bleu: use one of exact"):
        reward("bleu", "", [], "")

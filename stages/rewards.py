"""Rewards: pure functions of the completion and the reference answer, exact in fp32 and the same on every machine."""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from pipeline.errors import MissingPrerequisite, UserError

KINDS = ["exact", "math_verify", "dense"]
_NUMBER = re.compile(r"(?<![0-9.])-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
_DIGITS = re.compile(r"[0-9]+")
_BREVITY_TOKENS = 64  # dense: responses at least so long get nothing for being short

# math_verify: towers of powers, factorials and sums can keep a computer algebra system busy for ever. A time limit would make the reward
# depend on the machine, so a text is read only when it is cheap: known LaTeX commands, short numbers, small single exponents.
_TAIL = 500  # characters at the end of the text in which the answer is looked for
_LARGEST_POWER = 1000  # product of all exponents
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_CHEAP_COMMANDS = {
    "angle", "approx", "begin", "big", "Big", "bmatrix", "boxed", "cap", "cdot", "circ", "cup", "degree", "dfrac", "div", "dots", "end",
    "equiv", "fbox", "frac", "ge", "geq", "implies", "in", "infty", "langle", "ldots", "le", "left", "leq", "mathbb", "mathbf",
    "mathrm", "mbox", "neq", "pi", "pm", "pmatrix", "qquad", "quad", "rangle", "right", "Rightarrow", "rightarrow", "sqrt", "text",
    "textbf", "tfrac", "therefore", "theta", "times", "to",
}  # fmt: skip
_COSTLY = re.compile(r"[0-9]{40}|[0-9)}\]]\s*!(?!=)")
_POWER = re.compile(r"\^|\*\*")
_EXPONENT = re.compile(
    r"\s*[{(]?\s*-?(?P<a>[0-9]{0,2})(?:[a-z]|\\circ|\\prime)?(?:\s*[-+/]\s*(?P<b>[0-9]{0,2})[a-z]?)?\s*[)}]?(?![0-9a-z.*!({])"
)


def reward(kind: str, completion_text: str, completion_token_ids: Sequence[int], answer: str) -> float:
    """The reward in [0, 1] of one completion, a value that fp32 holds exactly.

    completion_text: decoded without special tokens; completion_token_ids: the sampled ids, an end token included; answer: the reference.
    """
    match kind:
        case "exact":
            return exact(completion_text, answer)
        case "math_verify":
            return math_verified(completion_text, answer)
        case "dense":
            return dense(completion_text, len(completion_token_ids), answer)
        case _:
            raise UserError(f"data.reward={kind}: use one of {', '.join(KINDS)}")


def exact(text: str, answer: str) -> float:
    """1 when the last number in the text equals the answer as a number (1,024 = 1024 = 1024.0), or the whole text equals it; else 0."""
    if text.strip() == answer.strip():
        return 1.0
    expected = _NUMBER.fullmatch(answer.strip())
    numbers = _NUMBER.findall(text)
    return float(_decimal(numbers[-1]) == _decimal(expected.group())) if expected and numbers else 0.0


def _decimal(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


def dense(text: str, num_tokens: int, answer: str) -> float:
    """A reward with a slope everywhere, so that even an untrained byte-level model learns from it.

    1/2 * digits / characters + 3/8 * prefix / len(answer) + 1/8 * max(0, 64 - tokens) / 64, where prefix counts the answer's leading
    characters that the text's first run of digits starts with. An empty text gets 0. Integers up to one division, rounded once to fp32.
    """
    if not text:
        return 0.0
    digits = sum(character in "0123456789" for character in text)
    run = _DIGITS.search(text)
    prefix = _common_prefix(run.group() if run else "", answer)
    length, size, limit = len(text), max(1, len(answer)), _BREVITY_TOKENS
    brevity = max(0, limit - num_tokens)
    numerator = 4 * digits * size * limit + 3 * prefix * length * limit + brevity * length * size
    return _fp32(numerator / (8 * length * size * limit))


def _common_prefix(a: str, b: str) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def _fp32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def math_verified(text: str, answer: str) -> float:
    """1 when math-verify finds an expression in the text that equals the answer, else 0. Without its time limits, so always the same.

    An expression counts by its value: where the prompt itself contains one that equals the answer ("17 + 25"), repeating it scores, so use
    `exact` there. Looks at the last 500 characters; a text with mathematics that could take for ever to evaluate gets 0 (see `is_costly`).
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise MissingPrerequisite(
            "data.reward=math_verify: the package math-verify is not installed; run pip install math-verify[antlr4_9_3]"
        ) from error
    for name in ("parser", "grader"):  # they warn that no time limit is set
        logging.getLogger(f"math_verify.{name}").setLevel(logging.ERROR)
    tail = text[-_TAIL:]
    if is_costly(tail):
        return 0.0
    unlimited: Any = None  # math-verify's own word for "no time limit", which its annotation forgets
    gold = parse(answer if re.search(r"\$|\\\(|\\\[|\\boxed", answer) else f"${answer}$", parsing_timeout=unlimited)
    found = parse(tail, parsing_timeout=unlimited)
    return float(bool(gold and found) and verify(gold, found, timeout_seconds=None))


def is_costly(text: str) -> bool:
    """Whether a text holds mathematics whose evaluation has no bound we know: it is then never handed to computer algebra."""
    if _COSTLY.search(text) or any(command not in _CHEAP_COMMANDS for command in _COMMAND.findall(text)):
        return True
    product = 1
    for power in _POWER.finditer(text):
        exponent = _EXPONENT.match(text, power.end())
        if not exponent or _POWER.match(text[exponent.end() :].lstrip(" )}")):  # a tower
            return True
        product *= max(1, int(exponent["a"] or 1), int(exponent["b"] or 1))
    return product > _LARGEST_POWER

"""params.yaml as OmegaConf writes it: mappings and lists by indentation, a scalar a line. Anything else is an error, never a guess."""

from __future__ import annotations

import json
import re
from typing import Any

from .document import sha256

EXPERIMENT = ("name", "checkpoint", "data", "sampling", "objective", "optimizer", "numerics", "kernels", "iterations", "seed")
LINE = re.compile(r"(?P<indent> *)(?P<dash>- )?(?:(?P<key>[A-Za-z0-9_.-]+|'[^']*'|\"[^\"\\]*\"):(?: (?P<value>.+))?|(?P<item>.+))")
INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.[0-9]+)")
WORDS = {"null": None, "true": True, "false": False, "{}": {}, "[]": []}
PLAIN = re.compile(r"(?!-+( |$))[A-Za-z0-9_./+\-][^#:\n]*(?::[^ #:\n][^#:\n]*)*")


def parse(text: str) -> Any:
    """ValueError, with the line's number, for what OmegaConf does not write."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip() and not line.startswith("#")]
    value, rest = _block(lines, 0, 0)
    if rest != len(lines):
        raise ValueError(f"line {lines[rest][0]}: is indented otherwise than its neighbours")
    return value


def _match(line: tuple[int, str]) -> re.Match[str]:
    match = LINE.fullmatch(line[1])
    if match is None or "\t" in line[1]:
        raise ValueError(f"line {line[0]}: is not as OmegaConf writes it")
    return match


def _block(lines: list[tuple[int, str]], at: int, indent: int) -> tuple[Any, int]:
    """The mapping or list whose lines are indented by `indent`, and the line after it."""
    if at < len(lines) and _match(lines[at])["dash"]:
        return _list(lines, at, indent)
    found: dict[str, Any] = {}
    while at < len(lines):
        match = _match(lines[at])
        if len(match["indent"]) < indent:
            break
        if len(match["indent"]) > indent or match["dash"] or match["key"] is None:
            raise ValueError(f"line {lines[at][0]}: is no `key: value` where one is expected")
        key = match["key"].strip("'\"")
        if key in found:
            raise ValueError(f"line {lines[at][0]}: the key {key} comes twice")
        if match["value"] is not None:
            found[key], at = _scalar(match["value"], lines[at][0]), at + 1
            continue
        inner = _match(lines[at + 1]) if at + 1 < len(lines) else None
        deeper = inner is not None and (len(inner["indent"]) > indent or (len(inner["indent"]) == indent and inner["dash"]))
        if not deeper or inner is None:
            raise ValueError(f"line {lines[at][0]}: has no value")
        found[key], at = _block(lines, at + 1, len(inner["indent"]))
    return found, at


def _list(lines: list[tuple[int, str]], at: int, indent: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    while at < len(lines):
        match = _match(lines[at])
        if len(match["indent"]) < indent or not match["dash"]:
            break
        if len(match["indent"]) > indent:
            raise ValueError(f"line {lines[at][0]}: a list in a list")
        text = lines[at][1][indent + 2 :]
        found.append(_scalar(text, lines[at][0]))
        at += 1
    return found, at


def _scalar(text: str, number: int) -> Any:
    if text in WORDS:
        return WORDS[text]
    if INT.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    if len(text) > 1 and text[0] == text[-1] == "'" and "'" not in text[1:-1].replace("''", ""):
        return text[1:-1].replace("''", "'")
    if text[0] == '"':
        try:
            return json.loads(text)
        except ValueError:
            raise ValueError(f"line {number}: holds an escape that JSON does not have") from None
    if PLAIN.fullmatch(text) and text.strip() == text:
        return text
    raise ValueError(f"line {number}: {json.dumps(text)[:60]} is no scalar as OmegaConf writes it")


def experiment_digest(run: dict[str, Any]) -> str:
    """sha256 over the half of a run's configuration that decides every bit."""
    half = {key: run[key] for key in EXPERIMENT}
    return sha256(half)

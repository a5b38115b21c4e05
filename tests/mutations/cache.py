"""A damaged object in DVC's cache: DVC never hashes it again, hands it out to every run that shares it, and calls them up to date."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline import registry
from pipeline.errors import ResultsDiffer, UserError
from tests.mutations.clone import ORACLE, Clone
from tests.mutations.elements import stored
from tests.mutations.verdicts import Expected, Outcome, fault_of, said


@dataclass(frozen=True)
class Case:
    name: str
    file: str  # of the oracle's run
    tensor: str
    layout: str  # that is added while the object is damaged
    expected: Expected
    exit_code: int


CASES = (
    Case(
        "one bit of an array that all runs share (entropy)", "i0001/train/logprobs.safetensors", "entropy", "cp3",
        Expected(reason="train/hashes.json: sha256 of 1 tensors is not the hash of the stored bytes (the first: entropy)"),
        ResultsDiffer.exit_code,
    ),
    Case(
        "one bit of weights that the next iteration reads", "weights/weight_v000002/model.safetensors", "model.norm.weight", "tp2",
        Expected(reason="weight_v000002/model.safetensors: tensor model.norm.weight does not match the sha256 in tensors.json"),
        UserError.exit_code,
    ),
)  # fmt: skip


def cache_outcome(clone: Clone, case: Case) -> Outcome:
    """With the object damaged, `python -m pipeline` adds one more layout. The layout's own bytes are right, but DVC has them already: it
    takes the damaged object in their place."""
    started = time.perf_counter()
    path = clone.folder / "runs" / clone.keys[ORACLE] / case.file
    clone.command("dvc", "checkout", "--relink")  # a source mutation has left copies in place of links
    with flipped(clone.folder, path, case.tensor):
        noticed, text = clone.command("dvc", "checkout")
        found = clone.found(*clone.pipeline(case.layout))
    key = next(key for key in registry.load(clone.folder).run_keys() if f"-{case.layout}-" in key)
    clone.command("pipeline", "--forget", key)
    fault = fault_of(case.expected, found, clone.keys[ORACLE], key)
    if not fault and found.exit_code != case.exit_code:
        fault = f"the command ended with {found.exit_code}, expected {case.exit_code}"
    if noticed:
        fault = f"DVC has noticed it, so this proves nothing: {text}"
    return Outcome(
        case.name, "damaged object in DVC's cache", case.name, case.expected.text, said(found), fault, time.perf_counter() - started
    )


@contextmanager
def flipped(root: Path, path: Path, tensor: str) -> Iterator[None]:
    """The lowest bit of a tensor's element in the cached object behind `path`, in place and with its old times, as a bad disk would."""
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    cached = root / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
    element = stored(path, tensor)
    flip(cached, element.start)
    try:
        yield
    finally:
        flip(cached, element.start)


def flip(path: Path, byte: int) -> None:
    stat = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1]))
    path.chmod(stat.st_mode)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

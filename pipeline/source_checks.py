"""Checks of checkpoint and data sources, as far as they can be made without a download."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pipeline.config import Checkpoint, Data
from pipeline.digest import sha256_file
from pipeline.errors import MissingPrerequisite, UserError

PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}


def check_checkpoint(checkpoint: Checkpoint, root: Path) -> None:
    """Raises UserError or MissingPrerequisite; a relative local folder counts from `root`."""
    required = {
        "seeded": ("seed", "architecture"), "local": ("repo",), "hub": ("repo", "revision"), "modelscope": ("repo", "revision"),
        "gguf": ("repo", "revision", "file"),
    }[checkpoint.source]  # fmt: skip
    for key in required:
        if getattr(checkpoint, key) is None:
            raise UserError(f"checkpoint.{key}=null: source {checkpoint.source} needs {' and '.join(required)}")
    if checkpoint.sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", checkpoint.sha256):
        raise UserError(f"checkpoint.sha256={checkpoint.sha256}: must be 64 lower-case hex digits (null = not checked)")
    if checkpoint.source in ("hub", "modelscope"):
        _pinned("checkpoint.repo", checkpoint.repo, "checkpoint.revision", checkpoint.revision)
    if checkpoint.source == "local":
        _local(checkpoint, root)


def _pinned(repo_key: str, repo: str | None, revision_key: str, revision: str | None) -> None:
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo or ""):
        raise UserError(f"{repo_key}={repo}: must be owner/name")
    if not re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        raise UserError(f"{revision_key}={revision}: must be a full commit hash (40 hex digits); a branch or tag can move")


def _local(checkpoint: Checkpoint, root: Path) -> None:
    folder = root / Path(checkpoint.repo or "").expanduser()
    if not folder.is_dir():
        raise MissingPrerequisite(f"checkpoint.repo={checkpoint.repo}: no such folder; name one with config.json and *.safetensors")
    suffixes = {path.suffix for path in folder.iterdir()}
    if ".safetensors" not in suffixes:
        remedy = "is a pickle checkpoint, which can run code; convert it to safetensors" if suffixes & PICKLES else "holds no *.safetensors"
        raise UserError(f"checkpoint.repo={checkpoint.repo}: {remedy}")
    if not (folder / "config.json").exists():
        raise UserError(f"checkpoint.repo={checkpoint.repo}: holds no config.json; name a folder in Hugging Face layout")
    try:
        json.loads((folder / "config.json").read_bytes())
    except ValueError as error:
        raise UserError(f"checkpoint.repo={checkpoint.repo}: config.json is not JSON ({error}); repair or copy it again") from None
    if checkpoint.sha256 and (folder / "model.safetensors").exists():
        found = sha256_file(folder / "model.safetensors")
        if found != checkpoint.sha256:
            text = f"checkpoint.sha256={checkpoint.sha256}: {checkpoint.repo}/model.safetensors has {found}"
            raise UserError(f"{text}; copy the file again, or correct the key")


def check_data(data: Data, root: Path) -> None:
    """Raises UserError or MissingPrerequisite for a source that cannot be read."""
    if data.source != "arithmetic" and data.path is None:
        what = "a file with one JSON object a line" if data.source == "jsonl" else "owner/name of a data set, or a local folder"
        raise UserError(f"data.path=null: source {data.source} needs {what}")
    path = root / Path(data.path or "").expanduser()
    if data.source == "datasets" and not path.is_dir():
        _pinned("data.path", data.path, "data.revision", data.revision)
    if data.source == "jsonl":
        check_jsonl(path, data)


def check_jsonl(path: Path, data: Data) -> None:
    """Every line one object with prompt and answer, and enough of them. Raises with the first bad line's number."""
    example = json.dumps({data.prompt_key: "...", data.answer_key: "..."})
    if not path.is_file():
        raise MissingPrerequisite(f"data.path={data.path}: no such file; name one with {example} a line")
    lines = path.read_bytes().split(b"\n")
    if not lines[-1]:
        lines.pop()  # what follows the last line's end
    for number, line in enumerate(lines, start=1):
        if problem := _line_problem(line, data):
            raise UserError(f"data.path={data.path}: line {number} {problem}; write {example}, one a line")
    if len(lines) < data.num_prompts:
        raise UserError(f"data.num_prompts={data.num_prompts}: {data.path} has only {len(lines)}; lower the value or add prompts")


def _line_problem(line: bytes, data: Data) -> str | None:
    if not line.strip():
        return "is empty"
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "is not UTF-8"
    except ValueError:
        return "is not JSON"
    if not isinstance(record, dict):
        return "is not a JSON object"
    for key in (data.prompt_key, data.answer_key):
        value = record.get(key)
        if isinstance(value, bool) or not (isinstance(value, int | float) or (isinstance(value, str) and value.strip())):
            return f'has no text under "{key}"'
    return None

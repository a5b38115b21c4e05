"""Stage prompts: fix an experiment's prompts and their token ids in runs/prompts/<checkpoint>--<data>/.

prompts.jsonl holds one {"prompt_id", "prompt", "answer", "token_ids"} a line, digest.json the sha256 of its bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeline.config import Data
from pipeline.digest import canonical_json, sha256_file, write_bytes, write_json
from pipeline.errors import MissingPrerequisite, UserError
from pipeline.progress import track
from stages.fetch import check_output_folder, replace_folder

SOURCES = ["arithmetic", "datasets", "jsonl"]
WORDS = [
    "What is {0} {2} {1}?",
    "Compute {0} {2} {1}.",
    "How much is {0} {2} {1}?",
    "{0} {2} {1} = ?",
    "Please work out the value of {0} {2} {1}.",
]
SUFFIX = " Give only the number."


def make_prompts(data: Data, checkpoint_folder: Path, out: Path) -> dict[str, Any]:
    """Write the prompts folder `out`, whole or not at all. Returns {"num_prompts", "num_tokens", "sha256"}.

    The chat template of the checkpoint's tokenizer is applied, the generation prompt included. Raises UserError, one line.
    """
    check_output_folder(out)
    pairs = list(load_pairs(data))
    rows = encode(pairs, data.system_prompt, checkpoint_folder)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        path = partial / "prompts.jsonl"
        write_bytes(path, "".join(canonical_json(row) + "\n" for row in rows).encode())
        summary = {"num_prompts": len(rows), "num_tokens": sum(len(row["token_ids"]) for row in rows), "sha256": sha256_file(path)}
        write_json(partial / "digest.json", summary)
        replace_folder(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return summary


def load_pairs(data: Data) -> Iterator[tuple[str, str]]:
    """(prompt, answer) of the first `data.num_prompts` prompts. Raises UserError when the source has fewer."""
    if data.num_prompts < 1:
        raise UserError(f"data.num_prompts={data.num_prompts}: must be at least 1")
    match data.source:
        case "arithmetic":
            yield from (arithmetic(data.seed, i, data.style, data.max_digits) for i in range(data.num_prompts))
        case "jsonl":
            yield from _take(_jsonl_rows(data), data)
        case "datasets":
            yield from _take(_dataset_rows(data), data)
        case _:
            raise UserError(f"data.source={data.source}: use one of {', '.join(SOURCES)}")


# --- arithmetic ---------------------------------------------------------------------------------------------------------------
def arithmetic(seed: int, index: int, style: str, max_digits: int) -> tuple[str, str]:
    """Problem number `index` and its answer, from (seed, index) alone. Operand sizes vary, so that prompts have mixed lengths."""
    if style not in ("terse", "words"):
        raise UserError(f"data.style={style}: use terse or words")
    if not 1 <= max_digits <= 9:
        raise UserError(f"data.max_digits={max_digits}: must be in 1..9")
    draw = _draws(seed, index)
    a, b = (next(draw) % 10 ** (1 + next(draw) % max_digits) for _ in range(2))
    operator = "+-*"[next(draw) % 3] if style == "words" else "+-"[next(draw) % 2]
    if operator == "-" and a < b:
        a, b = b, a  # answers stay digits only
    answer = {"+": a + b, "-": a - b, "*": a * b}[operator]
    template = WORDS[next(draw) % len(WORDS)] + SUFFIX if style == "words" else "{0}{2}{1}="
    return template.format(a, b, operator), str(answer)


def _draws(seed: int, index: int) -> Iterator[int]:
    """Counter-based random 64-bit integers: number j is a function of (seed, index, j)."""
    j = 0
    while True:
        yield int.from_bytes(hashlib.sha256(f"{seed}/{index}/{j}".encode()).digest()[:8], "little")
        j += 1


# --- files and data sets -------------------------------------------------------------------------------------------------------
def _take(rows: Iterable[tuple[str, dict[str, Any]]], data: Data) -> Iterator[tuple[str, str]]:
    """The first num_prompts rows as (prompt, answer); `rows` gives (where, object)."""
    count = 0
    for where, row in rows:
        if count == data.num_prompts:
            return
        yield _text(row, data.prompt_key, where), _answer(_text(row, data.answer_key, where), data.answer_after, where)
        count += 1
    if count < data.num_prompts:
        raise UserError(f"data.num_prompts={data.num_prompts}: {data.path} has only {count}; lower the value or add prompts")


def _text(row: dict[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f'{where}: no text under "{key}"; each needs a prompt and an answer (data.prompt_key, data.answer_key)')
    return value


def _answer(text: str, mark: str | None, where: str) -> str:
    """All of the text, or what follows the last mark; thousands separators go ("1,234" is 1234)."""
    if mark is not None:
        if mark not in text:
            raise UserError(f"{where}: no {mark!r} in the answer; correct data.answer_after or the data")
        text = text.rsplit(mark, 1)[1]
    text = text.strip()
    return text.replace(",", "") if re.fullmatch(r"-?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?", text) else text


def _jsonl_rows(data: Data) -> Iterator[tuple[str, dict[str, Any]]]:
    path = Path(data.path or "")
    if not data.path or not path.is_file():
        raise MissingPrerequisite(f"data.path={data.path}: no such file; name one with a JSON object a line")
    lines = path.read_bytes().split(b"\n")
    if lines and not lines[-1]:
        lines.pop()  # the newline that ends the file
    for number, line in enumerate(lines, 1):
        where = f"data.path={data.path}, line {number}"
        if not line.strip():
            raise UserError(f"{where}: empty; remove it")
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError as error:
            raise UserError(f"{where}: malformed JSON ({str(error).splitlines()[0]}); write one object a line") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: no JSON object; write one object a line")
        yield where, row


def _dataset_rows(data: Data) -> Iterator[tuple[str, dict[str, Any]]]:
    if not data.path:
        raise UserError("data.path=null: source datasets needs owner/name or a local folder")
    local = Path(data.path).is_dir()
    if not local and not re.fullmatch(r"[0-9a-f]{40}", data.revision or ""):
        raise UserError(f"data.revision={data.revision}: give the whole commit hash (40 hex digits); a branch or tag can move")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingPrerequisite("data.source=datasets: the package datasets is not installed; run pip install datasets") from error
    try:
        rows = load_dataset(data.path, data.subset, split=data.split, revision=None if local else data.revision)
    except Exception as error:  # its own errors, the hub's, requests', pyarrow's: by version
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MissingPrerequisite(
            f"data.path={data.path}, split={data.split}: not loaded ({reason}); check name, revision and network"
        ) from error
    for i, row in enumerate(rows):
        yield f"data.path={data.path}, row {i}", dict(row)


# --- token ids ------------------------------------------------------------------------------------------------------------------
def encode(pairs: list[tuple[str, str]], system_prompt: str | None, checkpoint_folder: Path) -> list[dict[str, Any]]:
    """Rows of prompts.jsonl: chat template applied by transformers, or the bare prompt where the tokenizer has none (base models)."""
    if not (checkpoint_folder / "tokenizer.json").is_file():
        raise MissingPrerequisite(f"{checkpoint_folder}: no tokenizer.json in it; run stage fetch first")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint_folder), local_files_only=True, trust_remote_code=False)
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    rows = []
    for prompt_id, (prompt, answer) in enumerate(track(pairs, "encode prompts")):
        if tokenizer.chat_template:
            messages = [*system, {"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False).input_ids
        else:
            ids = tokenizer((system_prompt or "") + prompt).input_ids
        rows.append({"prompt_id": prompt_id, "prompt": prompt, "answer": answer, "token_ids": list(ids)})
    return rows


def rank_main(args: dict[str, Any]) -> dict[str, Any]:
    from pipeline import registry

    known = registry.load()
    checkpoint, data = known.prompts(args["key"])
    return make_prompts(data, known.paths.checkpoint(checkpoint.name), known.paths.prompts(checkpoint.name, data.name))


if __name__ == "__main__":
    from stages import entry

    entry.run_alone("prompts")

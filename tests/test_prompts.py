"""Prompts: generated, from JSONL and through `datasets`; the same bytes every time, a line number in every complaint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Checkpoint, Data
from pipeline.digest import sha256_file
from pipeline.errors import MissingPrerequisite, UserError
from stages.fetch import fetch
from stages.prompts import arithmetic, encode, load_pairs, make_prompts
from stages.rewards import reward


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    fetch(Checkpoint(name="tiny", source="seeded", seed=0, architecture={**sizes, "vocab_size": 272}), folder)
    return folder


def jsonl(tmp_path: Path, text: str | bytes, **changes: Any) -> Data:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return Data(**{"name": "own", "source": "jsonl", "num_prompts": 1, "path": str(path), **changes})


# --- arithmetic ---------------------------------------------------------------------------------------------------------------
def test_arithmetic_files_are_the_same_bytes_every_time(tmp_path: Path, checkpoint: Path) -> None:
    data = Data(name="sums", source="arithmetic", num_prompts=64)
    summary = make_prompts(data, checkpoint, tmp_path / "a")
    assert summary == make_prompts(data, checkpoint, tmp_path / "b") == json.loads((tmp_path / "a" / "digest.json").read_text())
    assert summary["sha256"] == sha256_file(tmp_path / "b" / "prompts.jsonl")
    assert summary["sha256"].startswith("7b14c053"), "the same on every machine"
    rows = [json.loads(line) for line in (tmp_path / "a" / "prompts.jsonl").read_text().split("\n")[:-1]]
    assert [row["prompt_id"] for row in rows] == list(range(64))
    assert all(row["token_ids"] == [259, *row["prompt"].encode(), 260] for row in rows), "the chat template's marks, one token a byte"
    assert len({len(row["token_ids"]) for row in rows}) >= 3, "mixed lengths"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    other = make_prompts(Data(name="sums", source="arithmetic", num_prompts=64, seed=1), checkpoint, tmp_path / "b")
    assert other["sha256"] != summary["sha256"]


@pytest.mark.parametrize("style", ["terse", "words"])
def test_arithmetic_answers_are_right(style: str) -> None:
    problems = [arithmetic(3, i, style, 3) for i in range(200)]
    assert problems[:10] == [arithmetic(3, i, style, 3) for i in range(10)], "a function of seed and index"
    assert len({prompt for prompt, _ in problems}) > 150
    for prompt, answer in problems:
        expression = "".join(character for character in prompt if character in "0123456789+-*")
        assert str(eval(expression)) == answer
        assert reward("exact", f"It is {answer}.", [], answer) == 1.0


# --- JSONL --------------------------------------------------------------------------------------------------------------------
def test_jsonl_keeps_order_and_text(tmp_path: Path, checkpoint: Path) -> None:
    rows = [{"prompt": "a\u2028b", "answer": "1,234"}, {"prompt": "é?", "answer": 7}, {"prompt": "not taken", "answer": "0"}]
    data = jsonl(tmp_path, "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), num_prompts=2)
    assert list(load_pairs(data)) == [("a\u2028b", "1234"), ("é?", "7")]
    assert encode([("q", "a")], "be brief", checkpoint)[0]["token_ids"] == [258, *b"be brief", 259, *b"q", 260]


@pytest.mark.parametrize(
    ("second_line", "message"),
    [
        ("", "line 2: empty"),
        ("   ", "line 2: empty"),
        ('{"prompt": "x"', "line 2: malformed JSON"),
        (b'{"prompt": "\xff", "answer": "1"}', "line 2: malformed JSON"),
        ('["x", "y"]', "line 2: no JSON object"),
        ('{"prompt": "x"}', 'line 2: no text under "answer"'),
        ('{"prompt": " ", "answer": "1"}', 'line 2: no text under "prompt"'),
        ('{"prompt": "x", "answer": true}', 'line 2: no text under "answer"'),
        (None, "data.num_prompts=3: .* has only 1"),
    ],
)
def test_jsonl_faults_give_the_line(tmp_path: Path, checkpoint: Path, second_line: str | bytes | None, message: str) -> None:
    good = b'{"prompt": "3+4=", "answer": "7"}\n'
    second = b"" if second_line is None else (second_line if isinstance(second_line, bytes) else second_line.encode()) + b"\n" + good
    with pytest.raises(UserError, match=message) as error:
        make_prompts(jsonl(tmp_path, good + second, num_prompts=3), checkpoint, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_answers_after_a_mark(tmp_path: Path) -> None:
    row = json.dumps({"question": "How many?", "answer": "3 #### no\n#### 1,024"})
    data = jsonl(tmp_path, row, prompt_key="question", answer_after="####")
    assert list(load_pairs(data)) == [("How many?", "1024")]
    with pytest.raises(UserError, match="line 1: no '=>' in the answer"):
        list(load_pairs(jsonl(tmp_path, row, prompt_key="question", answer_after="=>")))


# --- datasets -----------------------------------------------------------------------------------------------------------------
def test_the_gsm8k_preset_reads_its_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two made-up rows in GSM8K's form, in a local folder: what is not covered is the download."""
    import datasets
    from omegaconf import OmegaConf

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    folder = tmp_path / "rows"
    folder.mkdir()
    solution = "Each box has 6 eggs.\n6*200=<<6*200=1200>>1200\n#### 1,200"
    rows = [{"question": f"Boxes {i}?", "answer": solution} for i in range(2)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    preset: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).parents[1] / "conf" / "data" / "gsm8k.yaml"))
    data = Data(**{**preset, "path": str(folder), "subset": None, "num_prompts": 2})
    assert list(load_pairs(data)) == [("Boxes 0?", "1200"), ("Boxes 1?", "1200")]
    assert preset["path"] == "openai/gsm8k" and len(preset["revision"]) == 40
    with pytest.raises(MissingPrerequisite, match="split=test: not loaded"):
        list(load_pairs(Data(**{**preset, "path": str(folder), "subset": None, "split": "test"})))


# --- faults -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "sql"}, "data.source=sql: use one of arithmetic, datasets, jsonl"),
        ({"num_prompts": 0}, "data.num_prompts=0"),
        ({"style": "poem"}, "data.style=poem"),
        ({"max_digits": 10}, "data.max_digits=10"),
        ({"source": "jsonl"}, "data.path=None: no such file"),
        ({"source": "datasets", "path": "owner/name", "revision": "main"}, "data.revision=main: give the whole commit hash"),
    ],
)
def test_faults_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(load_pairs(Data(**{"name": "d", "source": "arithmetic", "num_prompts": 4, **changes})))


def test_prompts_need_a_fetched_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(MissingPrerequisite, match="run stage fetch first"):
        make_prompts(Data(name="d", source="arithmetic", num_prompts=4), tmp_path / "nowhere", tmp_path / "out")

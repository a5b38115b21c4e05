"""Stage fetch: put a checkpoint into runs/checkpoints/<name>/, in one form whatever its source, with a sha256 per tensor.

The folder: config.json, tokenizer.json and what goes with it, one model.safetensors under Hugging Face names, tensors.json.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from pipeline.config import Checkpoint
from pipeline.digest import hash_safetensors, read_json, sha256_file, tensors_digest, write_json
from pipeline.errors import UserError

SOURCES = ["gguf", "hub", "local", "modelscope", "seeded"]
FAMILIES = ["llama", "qwen3"]


def fetch(checkpoint: Checkpoint, out: Path) -> dict[str, Any]:
    """Write the checkpoint folder `out`: whole and checked, or not at all; what was there before stays until then.

    Returns {"name", "digest", "num_tensors", "num_bytes"}. Raises UserError or MissingPrerequisite, each one line.
    """
    check_output_folder(out)
    partial = out.with_name(f".{out.name}.partial")  # a sibling, so that the last step is a rename
    shutil.rmtree(partial, ignore_errors=True)  # of a killed run; the stage's lock keeps other writers away
    partial.mkdir(parents=True)
    try:
        download = _write_source(checkpoint, partial)
        summary = _complete(checkpoint, partial)
        replace_folder(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if download is not None:  # kept after an error, so that gigabytes need not come twice
        shutil.rmtree(download, ignore_errors=True)
    return summary


def _write_source(checkpoint: Checkpoint, folder: Path) -> Path | None:
    """Fill `folder` from the source; returns the download folder to remove at the end, if there is one."""
    from stages.sources import gguf, hub, local, modelscope, seeded

    download = folder.with_name(f".{checkpoint.name}.download-{str(checkpoint.revision)[:40]}")
    match checkpoint.source:
        case "seeded":
            seeded.make_seeded(checkpoint, folder)
        case "gguf":
            gguf.fetch_gguf(checkpoint, folder)
        case "local":
            local.copy_local(checkpoint, folder)
        case "hub":
            hub.download_hub(checkpoint, download)
        case "modelscope":
            modelscope.download_modelscope(checkpoint, download)
        case _:
            raise UserError(f"checkpoint.source={checkpoint.source}: use one of {', '.join(SOURCES)}")
    if checkpoint.source in ("hub", "modelscope"):
        local.move_published(download, folder, str(checkpoint.repo))
        return download
    return None


def _complete(checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    """Join shards, check everything, add tensors.json."""
    from stages.model import ModelConfig
    from stages.sources.shards import merge_shards, read_header

    where = checkpoint.repo or checkpoint.name
    merge_shards(folder, where)
    path = folder / "model.safetensors"
    num_bytes = sum(piece.size for piece in read_header(path, where))
    if checkpoint.sha256 and checkpoint.source != "gguf" and (found := sha256_file(path)) != checkpoint.sha256:
        raise UserError(f"checkpoint.sha256={checkpoint.sha256}: model.safetensors of {where} has {found}; correct the value or the source")
    if not (folder / "tokenizer.json").exists():
        raise UserError(f"checkpoint.repo={where}: no tokenizer.json in it; save its tokenizer with transformers first")
    config = read_json(folder / "config.json")
    check_architecture(checkpoint, config)
    ModelConfig.from_hf(config)  # a forward pass that we lack is said here, not hours later
    hashes = hash_safetensors(path)
    digest = tensors_digest(hashes)
    write_json(folder / "tensors.json", {"sha256": hashes, "digest": digest})
    return {"name": checkpoint.name, "digest": digest, "num_tensors": len(hashes), "num_bytes": num_bytes}


def check_architecture(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Raise UserError unless config.json is of a family we have a model for and says what checkpoint.architecture says.

    Layouts are checked against checkpoint.architecture before anything is fetched, so the two must agree.
    """
    if config.get("model_type") not in FAMILIES:
        raise UserError(
            f"checkpoint.name={checkpoint.name}: model_type {config.get('model_type')}; use a checkpoint of {' or '.join(FAMILIES)}"
        )
    for key, expected in (checkpoint.architecture or {}).items():
        found = _field(config, key)
        if found != expected:
            raise UserError(f"checkpoint.architecture.{key}={expected}: config.json says {found}; correct the value or the checkpoint")


def _field(config: dict[str, Any], key: str) -> Any:
    """A field of config.json; where it is left out, what transformers takes for it."""
    if key in config and config[key] is not None:
        return config[key]
    match key:
        case "rope_theta":  # transformers 5 moved it
            return (config.get("rope_parameters") or {}).get(key, 10000.0)
        case "head_dim":
            return config["hidden_size"] // config["num_attention_heads"]
        case "num_key_value_heads":
            return config["num_attention_heads"]
        case "tie_word_embeddings" | "attention_bias" | "mlp_bias":
            return False
        case _:
            return None


def stop_token_ids(folder: Path) -> list[int]:
    """The ids that end a response, sorted: eos_token_id of generation_config.json, else of config.json (a number or a list)."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists() and (ids := read_json(folder / name).get("eos_token_id")) is not None:
            return sorted({int(i) for i in (ids if isinstance(ids, list) else [ids])})
    return []


def check_output_folder(out: Path) -> None:
    """Refuse to write through a link: DVC would follow it out of the project."""
    for path in (out, *out.parents[:2]):
        if path.is_symlink():
            raise UserError(f"{path}: is a symbolic link; outputs must be real folders, so remove it")


def replace_folder(partial: Path, out: Path) -> None:
    """Put the finished folder in the place of `out`; the old one goes only when the new one is there."""
    for path in partial.iterdir():
        path.chmod(0o644)
    partial.chmod(0o755)
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.rename(out, old)
    try:
        os.rename(partial, out)
    except OSError:
        if old.exists():
            os.rename(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def rank_main(args: dict[str, Any]) -> dict[str, Any]:
    from pipeline import registry

    known = registry.load()
    return fetch(known.checkpoint(args["key"]), known.paths.checkpoint(args["key"]))


if __name__ == "__main__":
    from stages import entry

    entry.run_alone("fetch")

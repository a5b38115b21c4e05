"""Checkpoints made from a seed: a tiny Qwen3 or Llama whose bytes are the same on every machine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import Checkpoint
from pipeline.digest import write_json
from pipeline.errors import UserError
from pipeline.progress import track
from stages.byte_tokenizer import PAD, STOP_IDS, write_byte_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

_REQUIRED = ["hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size"]
_DEFAULTS: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "dtype": "float32", "hidden_act": "silu", "initializer_range": 0.02,
    "max_position_embeddings": 1024, "model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def make_seeded(checkpoint: Checkpoint, folder: Path) -> None:
    """Write config, byte-level tokenizer and fp32 weights: matrices normal(0, initializer_range), norm weights 1.

    Every tensor has its own stream of random numbers, keyed by (seed, its name): a new layer or another width changes no other tensor.
    Raises UserError for a missing seed or architecture field.
    """
    from safetensors.torch import save_file

    if checkpoint.seed is None:
        raise UserError("checkpoint.seed=null: source seeded needs an integer seed")
    config = model_config(dict(checkpoint.architecture or {}))
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": STOP_IDS, "pad_token_id": PAD})
    write_byte_tokenizer(folder, config["vocab_size"])
    shapes = parameter_shapes(config)
    tensors = {
        name: initial(name, shapes[name], checkpoint.seed, config["initializer_range"]) for name in track(shapes, f"make {checkpoint.name}")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def model_config(architecture: dict[str, Any]) -> dict[str, Any]:
    """The whole config.json from the fields that the checkpoint's configuration gives."""
    if missing := [key for key in _REQUIRED if key not in architecture]:
        raise UserError(f"checkpoint.architecture.{missing[0]} is missing; source seeded needs {', '.join(_REQUIRED)}")
    config = {**_DEFAULTS, **architecture}
    if config["model_type"] not in _CLASSES:
        raise UserError(f"checkpoint.architecture.model_type={config['model_type']}: use one of {', '.join(sorted(_CLASSES))}")
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return {
        "architectures": [_CLASSES[config["model_type"]]],
        "bos_token_id": None,
        "eos_token_id": STOP_IDS,
        "pad_token_id": PAD,
        **config,
    }


def parameter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """{Hugging Face name: shape} of all parameters, in model order."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        block = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        if config["model_type"] == "qwen3":
            block |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
        shapes |= {f"model.layers.{layer}.{module}.weight": shape for module, shape in block.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def initial(name: str, shape: tuple[int, ...], seed: int, std: float) -> Tensor:
    """fp32 initial value of a parameter: ones for norm weights (one axis), else std * normal, one fp32 multiplication."""
    import torch

    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.float32)
    from kernels.rng import normal

    stream = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return normal((seed, stream), shape) * torch.tensor(std, dtype=torch.float32)

"""Small random models of both architectures, ours and transformers'."""

import json
from dataclasses import replace

import torch

from pipeline.config import Kernels, Numerics
from pipeline.layout import MeshShape
from stages.exact_gradients import ExactGradients
from stages.mesh import Mesh
from stages.model import CausalLM, ModelConfig, implementations
from stages.parallel import Parallel
from stages.weights import load_slices

COMMON = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8,
    "vocab_size": 130, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
NUMERICS = Numerics(k_leaf=16, vocab_leaf=32, kv_leaf=8, token_leaf=8, grad_scale_log2=40)


def reference(architecture: str, tied: bool):
    import transformers

    torch.manual_seed(3)
    name = architecture.removesuffix("ForCausalLM")
    config = getattr(transformers, name + "Config")(**COMMON, tie_word_embeddings=tied)
    model = getattr(transformers, architecture)(config).float().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2 if p.dim() > 1 else 1.0)
    return model, {**config.to_dict(), "architectures": [architecture]}


def ours(hf, config: dict, case: str = "R/R", precision: str = "fp32") -> CausalLM:
    mesh, numerics = Mesh(MeshShape(), 0), replace(NUMERICS, precision=precision)
    model_config = ModelConfig.from_hf(json.loads(json.dumps(config)))
    model = CausalLM(model_config, Parallel(mesh, model_config.shape, numerics), implementations(Kernels(case), "training"))
    load_slices(model, ((n, p.detach()) for n, p in hf.named_parameters()))
    shapes = {n: p.shape for n, p in model.named_parameters()}
    model.par.grads = ExactGradients(shapes, NUMERICS.grad_scale_log2)
    return model

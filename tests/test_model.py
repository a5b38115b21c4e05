"""Our forward and backward pass against transformers' implementation, on both architectures."""

import json

import pytest
import torch

from pipeline.config import Numerics
from pipeline.layout import MeshShape
from stages.batch import Sample, pack
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


def ours(hf, config: dict, case: str = "R/R") -> CausalLM:
    mesh = Mesh(MeshShape(), 0)
    model_config = ModelConfig.from_hf(json.loads(json.dumps(config)))
    model = CausalLM(model_config, Parallel(mesh, model_config.shape, NUMERICS), implementations(case, "training"))
    load_slices(model, ((n, p.detach()) for n, p in hf.named_parameters()))
    shapes = {n: p.shape for n, p in model.named_parameters()}
    model.par.grads = ExactGradients(shapes, NUMERICS.grad_scale_log2)
    return model


def batch_of_two():
    torch.manual_seed(0)
    ids = [torch.randint(0, 130, (n,)) for n in (21, 34)]
    return ids, pack([Sample(0, ids[0], 5, 0), Sample(1, ids[1], 9, 16)], NUMERICS.token_leaf)


@pytest.mark.parametrize("case", ["R/R", "P/P"])
@pytest.mark.parametrize("architecture, tied", [("Qwen3ForCausalLM", False), ("LlamaForCausalLM", True)])
def test_logprobs_entropy_and_gradients_match_transformers(architecture, tied, case):
    hf, config = reference(architecture, tied)
    model = ours(hf, config, case)
    ids, batch = batch_of_two()
    logp, entropy = model(batch, 1 / 0.7)
    hf = hf.double()
    expected_logp, expected_entropy = [], []
    for tokens, prompt in zip(ids, (5, 9)):
        z = torch.log_softmax(hf(tokens[None, :-1]).logits[0] / 0.7, -1)[prompt - 1 :]
        expected_logp.append(z.gather(1, tokens[prompt:, None])[:, 0])
        expected_entropy.append(-(z.exp() * z).sum(-1))
    expected_logp, expected_entropy = torch.cat(expected_logp), torch.cat(expected_entropy)
    torch.testing.assert_close(logp.double(), expected_logp, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-4, atol=1e-4)
    (logp * 0.3 + entropy * 0.1).sum().backward()
    (expected_logp * 0.3 + expected_entropy * 0.1).sum().backward()
    expected = dict(hf.named_parameters())
    for name, parameter in model.named_parameters():
        exact = model.par.grads.touched(name)
        got = model.par.grads.finish(name, 1.0).double() if exact else torch.zeros(parameter.shape).double()
        if parameter.grad is not None:
            got = got + parameter.grad
        error = (got - expected[name].grad).norm() / expected[name].grad.norm()
        assert error < 1e-4, (name, float(error))


@pytest.mark.parametrize(
    "key, value", [("attention_bias", True), ("architectures", ["GPT2LMHeadModel"]), ("rope_scaling", {"rope_type": "yarn"})]
)
def test_a_model_that_is_not_ours_is_refused(key, value):
    _, config = reference("LlamaForCausalLM", True)
    with pytest.raises(ValueError, match="config.json"):
        ModelConfig.from_hf({**config, "rope_parameters": None, key: value})

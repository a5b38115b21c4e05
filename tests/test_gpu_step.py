"""A whole on-policy distillation step - rollout, teacher, student, backward, AdamW - through the Triton kernels, under the interpreter.

It proves that the kernels, called as the stages call them, end in the bytes of the C++ kernels in fp32. It does not prove that a GPU's
instructions round as the interpreter does; `tests/gpu/run.py` looks at that, by the same digest.
"""

from __future__ import annotations

import pytest

from kernels import device
from stages import opd_profile

MICRO = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "vocab_size": 80, "rope_theta": 1e4,
}  # fmt: skip
LEAVES = {"k_leaf": 16, "vocab_leaf": 32, "kv_leaf": 4, "token_leaf": 4, "grad_scale_log2": 40}


def digests(shape: str, monkeypatch) -> tuple[str, str]:
    """After one step: by C++, by Triton."""
    results = []
    for interpreted in (False, True):
        monkeypatch.setattr(device, "interpreted", interpreted)
        step = opd_profile.Step(shape, "fp32", "cpu")
        step.run()
        results.append(step.digest())
    return results[0], results[1]


def test_a_small_step_ends_in_the_same_bytes(monkeypatch):
    monkeypatch.setitem(opd_profile.SHAPES, "micro", MICRO)
    monkeypatch.setitem(opd_profile.LEAVES, "micro", LEAVES)
    monkeypatch.setattr(opd_profile, "PROMPT", (1, 72))
    monkeypatch.setattr(opd_profile, "NEW_TOKENS", 3)
    cpu, triton = digests("micro", monkeypatch)
    assert cpu == triton
    monkeypatch.setitem(opd_profile.LEAVES, "micro", {**LEAVES, "k_leaf": 8})
    monkeypatch.setattr(device, "interpreted", False)
    other = opd_profile.Step("micro", "fp32", "cpu")
    other.run()
    assert other.digest() != cpu, "the control: other leaves are another sum"


@pytest.mark.slow
def test_the_tiny_step_ends_in_the_same_bytes(monkeypatch):
    cpu, triton = digests("tiny", monkeypatch)
    assert cpu == triton

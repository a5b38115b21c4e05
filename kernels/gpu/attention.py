"""kernels/attention.py in Triton: the functions, with arguments that are checked there."""

from kernels.gpu import attention_backward, attention_forward
from kernels.gpu.attention_backward import backward_kv, backward_q
from kernels.gpu.attention_forward import forward

__all__ = ["backward_kv", "backward_q", "compile_cases", "forward"]


def compile_cases() -> list:
    """Heads of Qwen3-0.6B (16/8, head dim 128), leaves of 128 keys and 64 queries."""
    import torch

    cases = []
    for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        cases += attention_forward.cases_of(kind, dtype) + attention_backward.cases_of(kind, dtype)
    return cases

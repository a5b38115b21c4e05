"""kernels/attention.py in Triton: the functions, with arguments that are checked there."""

from kernels.gpu.attention_forward import forward

__all__ = ["forward"]

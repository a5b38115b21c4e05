"""Peak memory of a call, in a process of its own: `python -m kernels.bench.memory logprob|attention SIZE` prints bytes above its inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from kernels.bench.shapes import QWEN3_06B, SMOLLM2, randn


def status(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def peak(function: Callable[[], object]) -> int:
    """Most resident bytes during the call, above those before it."""
    before = status("VmRSS:")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts again from here
    function()
    return status("VmHWM:") - before


def logprob_call(rows: int) -> Callable[[], object]:
    """Forward of the fused head of Qwen3-0.6B, H = 64 to spare time: logits count, weights don't."""
    from kernels import logprob

    s = QWEN3_06B
    h, w, targets = randn(rows, 64), randn(s.vocab, 64), torch.arange(rows)
    return lambda: logprob.partials(h, w, targets, 1.0, 64, s.vocab_leaf, 0, [(0, -(-s.vocab // s.vocab_leaf))])


def attention_call(tokens: int) -> Callable[[], object]:
    """Forward and backward of SmolLM2's attention."""
    from kernels import attention

    s, scale = SMOLLM2, SMOLLM2.head_dim**-0.5
    q, do = (randn(tokens, s.heads, s.head_dim, seed=i) for i in range(2))
    k, v = (randn(tokens, s.kv_heads, s.head_dim, seed=i) for i in range(2))
    seqs, positions, ranges = torch.tensor([[0, tokens, 0, tokens]]), torch.arange(tokens), torch.tensor([[0, 0, tokens]])

    def both() -> None:
        o, m, norm = attention.forward(q, k, v, seqs, positions, scale, s.kv_leaf)
        _, delta = attention.backward_q(do, q, k, v, o, m, norm, seqs, positions, scale, s.kv_leaf)
        attention.backward_kv(do, q, k, v, m, norm, delta, seqs, positions, ranges, scale, s.token_leaf)

    return both


def main() -> None:
    call = {"logprob": logprob_call, "attention": attention_call}[sys.argv[1]]
    call(2)()  # loads the library and grows nothing much
    function = call(int(sys.argv[2]))
    print(peak(function))


if __name__ == "__main__":
    main()

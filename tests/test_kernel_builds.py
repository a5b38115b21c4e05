"""Every build of the kernels (AVX512, AVX2, and one without either) gives the same bits, on any number of threads."""

from __future__ import annotations

import hashlib

import pytest
import torch

from kernels import adamw, elementwise, embedding, logprob, reduce, rms_norm, rng, rope, swiglu
from kernels.cpu import build

RANDOM = "71f7f8dbd26183d2630a853464b21adbe513017b276398d806ef81aa1fa477b8"
TABLES = "0171d89f9502a27d8668f0ae5e7f387e2b21b21308376f822384a0beab641372"


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)).hexdigest()


def rowwise_outputs(x: torch.Tensor, dy: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """Operations on rows; x, dy [200, 3, 70]."""
    w = 1 + rng.normal((3,), (70,))
    y, rstd = rms_norm.forward(x, w, 1e-6)
    norm_grad, table_grad = torch.zeros(70, dtype=torch.int64), torch.zeros(9, 210, dtype=torch.int64)
    dx = rms_norm.backward(dy, x, w, rstd, norm_grad, torch.arange(0, 201, 40), 40)
    x16, dy16, w16 = x.bfloat16(), dy.bfloat16(), w.bfloat16()
    embedding.accumulate_grad(table_grad, torch.arange(200) % 11, dy.view(200, 210), 1, 40)
    return {
        "rms_norm": [y, rstd, dx, norm_grad],
        "embedding": [table_grad],
        "swiglu": [swiglu.forward(x[:, 0] * 5, x[:, 1]), *swiglu.backward(dy[:, 0], x[:, 0] * 5, x[:, 1])],
        "rope": [rope.apply(t, torch.arange(200), *rope.tables(70, 200, 1e6)) for t in (x, x16)],
        "bf16": [
            rms_norm.forward(x16, w16, 1e-6)[0],
            rms_norm.backward(dy16, x16, w16, rstd),
            swiglu.forward(x16[:, 0] * 5, x16[:, 1]),
            *swiglu.backward(dy16[:, 0], x16[:, 0] * 5, x16[:, 1]),
        ],
    }


def outputs() -> dict[str, str]:
    """Digest of every operation's results, on large enough inputs that threads share the work."""
    x, dy = rng.normal((1,), (200, 3, 70)), rng.normal((2,), (200, 3, 70))
    flat = rng.normal((5,), (70_001,)) * 20
    results = rowwise_outputs(x, dy) | {name: [getattr(elementwise, name)(flat)] for name in ("exp", "silu")}
    results |= {name: [getattr(elementwise, name)(flat.abs())] for name in ("log", "sqrt", "rsqrt")}
    p, m, v = flat.clone(), flat * 0.01, flat.square()
    adamw.step(p, flat.flip(0), m, v, 1e-2, 0.9, 0.95, 1e-8, 0.1, 3)
    results["adamw"] = [p, m, v]
    fixed = reduce.to_fixed(flat, 40)
    limbs = reduce.square_limbs([flat], reduce.max_exponent([flat]))
    results["reduce"] = [fixed, reduce.to_fixed(flat, -3), reduce.from_fixed(fixed, 40, 3.0), limbs]
    logits = rng.normal((6,), (40, 777)) * 3
    keys = rng.sample_keys(1, 2, range(40), [0] * 40, range(40))
    results["rng"] = [flat, rng.uniform((7,), 30_000), rng.gumbel(8, 30_000), keys]
    results["sample"] = [rng.sample(logits, 1.3, keys), rng.sample(logits, 1.3, keys, 30), rng.sample(logits, 1.3, keys, 0, 0.9)]
    w, targets, nodes = rng.normal((9,), (777, 70)), torch.arange(200) * 3, [(0, 2), (2, 4)]
    stats, target = logprob.partials(x[:, 0], w, targets, 1.3, 32, 200, 0, nodes)
    logps, entropy, lse = logprob.finish(logprob.merge(*stats), target)
    acc = torch.zeros(777, 70, dtype=torch.int64)
    args = (lse, entropy, x[:, 0, 0].contiguous(), x[:, 0, 1].contiguous(), 1.3, 32, 200, 0, nodes, acc, torch.arange(0, 201, 50), 40)
    results["logprob"] = [stats, logps, entropy, lse, logprob.backward(x[:, 0], w, targets, *args), acc]
    return {name: digest(*tensors) for name, tensors in results.items()}


@pytest.mark.parametrize(("name", "threads"), [("avx512", 3), ("avx2", 1), ("avx2", 2), ("scalar", 1)])
def test_builds_and_threads_agree(name, threads, monkeypatch):
    if name not in build.runnable_builds():
        pytest.skip(f"this processor can't run {name}")
    expected = outputs()
    monkeypatch.setattr(build, "_library", build.load(build.build(name)))
    build.set_threads(threads)
    try:
        assert outputs() == expected
    finally:
        build.set_threads(1)


def test_random_numbers_and_tables_are_these_bytes():
    """Known answers of ours: they hold on every machine and with every compiler."""
    assert digest(rng.normal((0, 1), (1000,)), rng.uniform((0, 1), 1000), rng.gumbel(1, 1000)) == RANDOM
    assert digest(*rope.tables(128, 4096, 1e6)) == TABLES

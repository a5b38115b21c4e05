"""attention: forward and backward of one sequence, and a decode step over a cache, against scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kernels import attention
from kernels.bench.shapes import Shape, dtypes, models, randn
from kernels.bench.timing import Case


def cases(device: str, quick: bool) -> Iterator[Case]:
    lengths = (128, 1024) if quick else (128, 1024, 4096)
    for shape in models(device):
        for dtype in dtypes(device):
            for tokens in lengths:
                if dtype == torch.float32 and device != "cpu" and tokens > 1024:
                    continue
                yield from _whole(shape, tokens, device, dtype)
            for batch in (1, 8) if quick else (1, 8, 32):
                for context in (128, 1024):
                    yield _decode(shape, batch, context, device, dtype)


def _whole(shape: Shape, tokens: int, device: str, dtype: torch.dtype) -> Iterator[Case]:
    h, g, d, scale = shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5
    q, do = (randn(tokens, h, d, device=device, dtype=dtype, seed=s) for s in (0, 1))
    k, v = (randn(tokens, g, d, device=device, dtype=dtype, seed=s) for s in (2, 3))
    seqs, positions = torch.tensor([[0, tokens, 0, tokens]], device=device), torch.arange(tokens, device=device)
    ranges = torch.tensor([[0, 0, tokens]], device=device)
    heads = [x.transpose(0, 1)[None].contiguous().requires_grad_() for x in (q, k, v)]
    qh, kh, vh = heads
    back = do.transpose(0, 1)[None].contiguous()
    out = F.scaled_dot_product_attention(qh, kh, vh, is_causal=True, scale=scale, enable_gqa=True)
    o, m, norm = attention.forward(q, k, v, seqs, positions, scale, shape.kv_leaf)

    def backward() -> None:
        _, delta = attention.backward_q(do, q, k, v, o, m, norm, seqs, positions, scale, shape.kv_leaf)
        attention.backward_kv(do, q, k, v, m, norm, delta, seqs, positions, ranges, scale, shape.token_leaf)

    def sdpa() -> None:
        with torch.no_grad():
            F.scaled_dot_product_attention(qh, kh, vh, is_causal=True, scale=scale, enable_gqa=True)

    pairs, size = tokens * (tokens + 1) / 2 * h * d, q.element_size()
    detail = f"T={tokens}" if device == "cpu" else f"T={tokens} {str(dtype)[6:]}"
    forward_target, backward_target = (1.3, 1.5) if device == "cpu" else (1 / 0.6, 1 / 0.6)
    heavy = pairs > 5e9
    yield Case(
        "attention forward", shape.name, detail, lambda: attention.forward(q, k, v, seqs, positions, scale, shape.kv_leaf), sdpa,
        forward_target, 4 * pairs, float(size * tokens * d * (2 * h + 2 * g)), heavy, dtype,
    )  # fmt: skip
    yield Case(
        "attention backward", shape.name, detail, backward, lambda: torch.autograd.grad(out, heads, back, retain_graph=True),
        backward_target, 10 * pairs, float(size * tokens * d * (4 * h + 4 * g)), heavy, dtype,
    )  # fmt: skip


def _decode(shape: Shape, batch: int, context: int, device: str, dtype: torch.dtype) -> Case:
    h, g, d, scale = shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5
    q = randn(batch, h, d, device=device, dtype=dtype)
    k, v = (randn(batch * context, g, d, device=device, dtype=dtype, seed=s) for s in (1, 2))
    seqs = torch.tensor([[i, i + 1, i * context, context] for i in range(batch)], device=device)
    positions = torch.full((batch,), context - 1, device=device)
    keys, values = (x.view(batch, context, g, d).transpose(1, 2).contiguous() for x in (k, v))
    queries = q[:, :, None]
    detail = f"B={batch} context={context}" + ("" if device == "cpu" else f" {str(dtype)[6:]}")
    target = 1.2 if device == "cpu" else 1 / 0.6
    return Case(
        "attention decode", shape.name, detail, lambda: attention.forward(q, k, v, seqs, positions, scale, shape.kv_leaf),
        lambda: F.scaled_dot_product_attention(queries, keys, values, scale=scale, enable_gqa=True), target,
        4.0 * batch * context * h * d, float(k.element_size() * 2 * batch * context * g * d), dtype=dtype,
    )  # fmt: skip

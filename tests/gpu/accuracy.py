"""Relative errors (norm over norm) against fp64, ours beside PyTorch's own operation on the same inputs, in fp32 and in bf16."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import attention, linear, logprob, rms_norm, rope, swiglu

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # a bf16 number is good to 2^-9; fp32 sums of some thousand terms to 1e-6
FACTOR = 4.0  # ours may be so many times as far off as PyTorch's
SCALE = 40
Results = dict[str, Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    rows, failed = [], False
    size = 1 if args.device == "cuda" else 8
    for dtype, limit in LIMITS.items():
        for measured in (linear_errors, attention_errors, logprob_errors, row_errors):
            try:
                for name, ours, theirs in measured(dtype, args.device, size):
                    good = ours <= max(limit / 100, min(limit, FACTOR * theirs))
                    rows.append([name, str(dtype)[6:], f"{ours:.2e}", f"{theirs:.2e}", "ok" if good else "TOO LARGE"])
                    failed |= not good
            except Exception as fault:
                traceback.print_exc()
                rows.append([measured.__name__, str(dtype)[6:], "-", "-", f"FAILED: {type(fault).__name__}"])
                failed = True
            if args.out:
                args.out.write_text(json.dumps(rows))
    for row in rows:
        print(*row, sep="\t")
    return int(failed)


def errors(ours: Results, theirs: Results, exact: Results) -> Iterator[tuple[str, float, float]]:
    for name, truth in exact.items():
        yield name, *(float((t[name].double() - truth).norm() / truth.norm()) for t in (ours, theirs))


def with_gradients(function: Callable[..., Tensor], grad: Tensor, inputs: Results) -> Results:
    """Result and gradients of a PyTorch function."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    y = function(**leaves)
    y.backward(grad.to(y.dtype))
    return {"forward": y.detach()} | {f"d{name}": t.grad for name, t in leaves.items() if t.grad is not None}


def compared(op: str, function: Callable[..., Tensor], grad: Tensor, inputs: Results, ours: Results) -> Iterator[tuple[str, float, float]]:
    exact = with_gradients(function, grad, {name: t.double() for name, t in inputs.items()})
    theirs = with_gradients(function, grad, inputs)
    for name, own, other in errors(ours, theirs, {key: exact[key] for key in ours}):
        yield f"{op} {name}", own, other


def linear_errors(dtype: torch.dtype, device: str, size: int) -> Iterator[tuple[str, float, float]]:
    for m in (1, 512 // size):
        n, k = 3072 // size, 1024 // size
        x, w, dy = (torch.randn(*shape, device=device).to(dtype) for shape in ((m, k), (n, k), (m, n)))
        acc = torch.zeros(n, k, dtype=torch.int64, device=device)
        linear.accumulate_weight_grad(acc, dy, x, torch.tensor([0, m], device=device), SCALE)
        ours = {"forward": linear.forward(x, w, 128), "dx": linear.input_grad(dy, w, 128), "dw": acc.double() / 2.0**SCALE}
        yield from compared(f"linear M={m}", lambda x, w: F.linear(x, w), dy, {"x": x, "w": w}, ours)


def attention_errors(dtype: torch.dtype, device: str, size: int) -> Iterator[tuple[str, float, float]]:
    n, heads, kv_heads, dim = 1024 // size, 16, 8, 128
    q, do = (torch.randn(n, heads, dim, device=device).to(dtype) for _ in range(2))
    k, v = (torch.randn(n, kv_heads, dim, device=device).to(dtype) for _ in range(2))
    seqs, positions = torch.tensor([(0, n, 0, n)], device=device), torch.arange(n, device=device)
    scale, ranges = dim**-0.5, torch.tensor([(0, 0, n)], device=device)
    o, m, norm = attention.forward(q, k, v, seqs, positions, scale, 128)
    dq, delta = attention.backward_q(do, q, k, v, o, m, norm, seqs, positions, scale, 128)
    dk, dv = attention.backward_kv(do, q, k, v, m, norm, delta, seqs, positions, ranges, scale, 128)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = [t.transpose(0, 1) for t in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))]
        return F.scaled_dot_product_attention(*(t[None] for t in heads_first), is_causal=True, scale=scale)[0].transpose(0, 1)

    yield from compared(f"attention {n}", plain, do, {"q": q, "k": k, "v": v}, {"forward": o, "dq": dq, "dk": dk, "dv": dv})


def logprob_errors(dtype: torch.dtype, device: str, size: int) -> Iterator[tuple[str, float, float]]:
    m, h, v, leaf = 64, 1024 // size, 16384 // size, 1024
    hidden, w = torch.randn(m, h, device=device).to(dtype), (torch.randn(v, h, device=device) / 16).to(dtype)
    targets, nodes = torch.arange(m, device=device) * 7, [(0, v // leaf)]
    stats, target = logprob.partials(hidden, w, targets, 1.0, 128, leaf, 0, nodes)
    logps, entropy, lse = logprob.finish(stats[0], target)
    g, acc = torch.randn(m, device=device), torch.zeros(v, h, dtype=torch.int64, device=device)
    tiles = torch.tensor([0, m], device=device)
    dh = logprob.backward(hidden, w, targets, lse, entropy, g, torch.zeros_like(g), 1.0, 128, leaf, 0, nodes, acc, tiles, SCALE)

    def plain(h: Tensor, w: Tensor) -> Tensor:
        wide = F.linear(h, w).to(torch.promote_types(h.dtype, torch.float32))
        return torch.log_softmax(wide, 1).gather(1, targets[:, None])[:, 0]

    yield from compared("logprob", plain, g, {"h": hidden, "w": w}, {"forward": logps, "dh": dh[0], "dw": acc.double() / 2.0**SCALE})


def row_errors(dtype: torch.dtype, device: str, size: int) -> Iterator[tuple[str, float, float]]:
    m, d = 256, 1024 // size
    x, up, dy = (torch.randn(m, d, device=device).to(dtype) for _ in range(3))
    w = torch.randn(d, device=device).to(dtype)
    y, rstd = rms_norm.forward(x, w, 1e-6)
    ours = {"forward": y, "dx": rms_norm.backward(dy, x, w, rstd)}
    yield from compared("rms_norm", lambda x, w: F.rms_norm(x, (d,), w, 1e-6), dy, {"x": x, "w": w}, ours)
    dgate, dup = swiglu.backward(dy, x, up)
    ours = {"forward": swiglu.forward(x, up), "dgate": dgate, "dup": dup}
    yield from compared("swiglu", lambda gate, up: F.silu(gate) * up, dy, {"gate": x, "up": up}, ours)
    heads, positions = x.view(m, -1, 64), torch.arange(m, device=device)
    cos, sin = (t.to(device) for t in rope.tables(64, m, 1e6))
    turned = {"forward": rope.apply(heads, positions, cos, sin)}
    exact, theirs = (rope_plain(t, cos, sin) for t in (heads.double(), heads))
    for _, own, other in errors(turned, {"forward": theirs}, {"forward": exact}):
        yield "rope forward", own, other


def rope_plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    c, s = (t[: len(x), None, :].to(x.dtype) for t in (cos, sin))
    first, second = x.chunk(2, dim=2)
    return torch.cat([first * c - second * s, second * c + first * s], dim=2)


if __name__ == "__main__":
    sys.exit(main())

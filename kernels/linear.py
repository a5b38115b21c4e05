"""Linear layers whose bits depend on nothing but the numbers: not on the number of rows, threads, registers or ranks.

Every output element is a halving tree over leaves of `leaf` terms (numbered on the unsharded axis), and a leaf is one sequential
chain of fp32 FMAs that starts at +0. A tensor-parallel partial is the same function on a slice that begins at a leaf. Weight
gradients are exact sums of token leaves, in int64 fixed point.
Shapes: M rows, K in-features, N out-features; weights are [N,K] as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import reduce
from kernels.cpu import build
from kernels.elementwise import fma_reference


def forward(x: Tensor, w: Tensor, leaf: int, dtype: torch.dtype | None = None) -> Tensor:
    """fp32 x [M,K], w [N,K] -> x @ w.T [M,N]; leaves over K. Rows may be strided (x[:, a:b]). ValueError on other shapes or dtypes."""
    m, k, n = *_matrix("x", x), len(w)
    if _matrix("w", w) != (n, k) or leaf < 1:
        raise ValueError(f"linear.forward: x {tuple(x.shape)}, w {tuple(w.shape)}, leaf {leaf} don't fit")
    y = torch.empty((m, n), dtype=torch.float32)
    build.library().linear_forward(x, x.stride(0), w, w.stride(0), y, m, n, k, leaf)
    return y


def input_grad(dy: Tensor, w: Tensor, leaf: int, dtype: torch.dtype | None = None) -> Tensor:
    """fp32 dy [M,N], w [N,K] -> dy @ w [M,K]; leaves over N. Strides and errors as in `forward`."""
    m, n, k = *_matrix("dy", dy), w.shape[-1]
    if _matrix("w", w) != (n, k) or leaf < 1:
        raise ValueError(f"linear.input_grad: dy {tuple(dy.shape)}, w {tuple(w.shape)}, leaf {leaf} don't fit")
    dx = torch.empty((m, k), dtype=torch.float32)
    build.library().linear_input_grad(dy, dy.stride(0), w, w.stride(0), dx, m, n, k, leaf)
    return dx


def accumulate_weight_grad(acc: Tensor, dy: Tensor, x: Tensor, tiles: Tensor, scale_log2: int) -> None:
    """acc [N,K] += fixed-point dW of fp32 dy [M,N], x [M,K], in place.

    tiles: int32/int64 [T+1], row boundaries 0..M of the token leaves. A leaf's dW is a chain over its rows; each element v is added as
    int64(round_half_even(v * 2^scale_log2)), so neither the order of leaves nor their placement on ranks matters.
    OverflowError when |v| * 2^scale_log2 reaches 2^61 or |acc| 2^62, or v is not finite; `acc` is then undefined.
    """
    (m, n), k = _matrix("dy", dy), x.shape[-1]
    if _matrix("x", x) != (m, k) or acc.shape != (n, k) or acc.dtype != torch.int64 or not acc.is_contiguous():
        raise ValueError(
            f"linear.accumulate_weight_grad: acc {acc.dtype} {tuple(acc.shape)}, dy {tuple(dy.shape)}, x {tuple(x.shape)} don't fit"
        )
    tiles = _boundaries(tiles, m)
    if build.library().linear_weight_grad(acc, dy, dy.stride(0), x, x.stride(0), n, k, tiles, len(tiles) - 1, 2.0**scale_log2):
        raise OverflowError(f"a weight gradient left the range of int64 at scale 2^{scale_log2}")


def _matrix(name: str, t: Tensor) -> tuple[int, int]:
    if t.dim() != 2 or t.dtype != torch.float32 or (t.shape[1] > 1 and t.stride(1) != 1):
        raise ValueError(f"{name}: expected an fp32 matrix with contiguous rows, got {t.dtype} {tuple(t.shape)}")
    return t.shape[0], t.shape[1]


def _boundaries(tiles: Tensor, m: int) -> Tensor:
    tiles = tiles.to(torch.int64).contiguous()
    values = tiles.tolist()
    if values[:1] != [0] or values[-1] != m or any(a > b for a, b in zip(values, values[1:])):
        raise ValueError(f"tiles: expected rising row boundaries from 0 to {m}")
    return tiles


# --- references --------------------------------------------------------------------------------------------------------------
def forward_reference(x: Tensor, w: Tensor, leaf: int) -> Tensor:
    """`forward` in plain torch, bit for bit."""
    return _product_reference(x, w.t(), leaf)


def input_grad_reference(dy: Tensor, w: Tensor, leaf: int) -> Tensor:
    """`input_grad` in plain torch, bit for bit."""
    return _product_reference(dy, w, leaf)


def accumulate_weight_grad_reference(acc: Tensor, dy: Tensor, x: Tensor, tiles: Tensor, scale_log2: int) -> None:
    """`accumulate_weight_grad` in plain torch, bit for bit."""
    bounds = tiles.tolist()
    for a, b in zip(bounds, bounds[1:]):
        acc += reduce.to_fixed_reference(_product_reference(dy[a:b].t(), x[a:b], max(1, b - a)), scale_log2)


def _product_reference(a: Tensor, b: Tensor, leaf: int) -> Tensor:
    """a [M,K] @ b [K,N]: a chain of `fma_reference` in each leaf, then the halving tree."""

    def chain(i: int) -> Tensor:
        acc = torch.zeros((a.shape[0], b.shape[1]))
        for k in range(i * leaf, min((i + 1) * leaf, a.shape[1])):
            acc = fma_reference(a[:, k, None], b[None, k, :], acc)
        return acc

    leaves = -(-a.shape[1] // leaf)
    tree: Callable[..., Tensor] = reduce.halving
    return tree(0, leaves, chain) if leaves else torch.zeros((a.shape[0], b.shape[1]))

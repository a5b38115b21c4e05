"""Linear layers whose bits depend on nothing but the numbers: not on the number of rows, threads, registers or ranks.

Every output element is a halving tree over leaves of `leaf` terms (numbered on the unsharded axis), and a leaf is one sequential
chain of fp32 FMAs that starts at +0. A tensor-parallel partial is the same function on a slice that begins at a leaf. Weight
gradients are exact sums of token leaves, in int64 fixed point.
Storage is fp32 or bf16, arithmetic fp32. Shapes: M rows, K in-features, N out-features; weights are [N,K] as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import device, reduce
from kernels.cpu import build
from kernels.elementwise import fma_reference

_STORED_AS_BF16 = {torch.float32: False, torch.bfloat16: True}


def forward(x: Tensor, w: Tensor, leaf: int, dtype: torch.dtype | None = None) -> Tensor:
    """x [M,K], w [N,K], both fp32 or both bf16 -> x @ w.T [M,N] in `dtype` (default: theirs); leaves over K. Rows may be strided
    (x[:, a:b]). bf16 is storage: operands are widened, sums are fp32 by the same rule, the result is rounded once, to nearest even.
    ValueError on other shapes, dtypes or mixed devices."""
    (m, k), n = x.shape if x.dim() == 2 else (0, -1), len(w)
    if w.shape != (n, k) or leaf < 1 or not _matrices(x, w):
        raise ValueError(f"linear.forward: {_described(x=x, w=w)}, leaf {leaf} don't fit")
    half, half_out = _storage(x, dtype)
    if device.on_gpu(x, w):
        from kernels.gpu import linear as gpu

        return gpu.forward(x, w, leaf, dtype or x.dtype)
    y = x.new_empty((m, n), dtype=dtype)
    build.library().linear_forward(x, x.stride(0), w, w.stride(0), y, m, n, k, leaf, half, half_out)
    return y


def input_grad(dy: Tensor, w: Tensor, leaf: int, dtype: torch.dtype | None = None) -> Tensor:
    """dy [M,N], w [N,K], both fp32 or both bf16 -> dy @ w [M,K] in `dtype`; leaves over N. Strides, dtypes and errors as in `forward`."""
    (m, n), k = dy.shape if dy.dim() == 2 else (0, -1), w.shape[-1]
    if w.shape != (n, k) or leaf < 1 or not _matrices(dy, w):
        raise ValueError(f"linear.input_grad: {_described(dy=dy, w=w)}, leaf {leaf} don't fit")
    half, half_out = _storage(dy, dtype)
    if device.on_gpu(dy, w):
        from kernels.gpu import linear as gpu

        return gpu.input_grad(dy, w, leaf, dtype or dy.dtype)
    dx = dy.new_empty((m, k), dtype=dtype)
    build.library().linear_input_grad(dy, dy.stride(0), w, w.stride(0), dx, m, n, k, leaf, half, half_out)
    return dx


def accumulate_weight_grad(acc: Tensor, dy: Tensor, x: Tensor, tiles: Tensor, scale_log2: int) -> None:
    """acc [N,K] += fixed-point dW of dy [M,N], x [M,K], both fp32 or both bf16, in place.

    tiles: int32/int64 [T+1], row boundaries 0..M of the token leaves. A leaf's dW is a chain over its rows; each element v is added as
    int64(round_half_even(v * 2^scale_log2)), so neither the order of leaves nor their placement on ranks matters.
    OverflowError when |v| * 2^scale_log2 reaches 2^61 or |acc| 2^62, or v is not finite; `acc` is then undefined.
    """
    (m, n), k = dy.shape if dy.dim() == 2 else (-1, 0), x.shape[-1]
    if x.shape != (m, k) or acc.shape != (n, k) or acc.dtype != torch.int64 or not acc.is_contiguous() or not _matrices(dy, x):
        raise ValueError(f"linear.accumulate_weight_grad: {_described(acc=acc, dy=dy, x=x)} don't fit")
    half, _ = _storage(x, None)
    if device.on_gpu(acc, dy, x):
        from kernels.gpu import linear as gpu

        gpu.accumulate_weight_grad(acc, dy, x, tiles, scale_log2)
        return
    tiles = _boundaries(tiles, m)
    strides = dy.stride(0), x.stride(0)
    if build.library().linear_weight_grad(acc, dy, strides[0], x, strides[1], n, k, tiles, len(tiles) - 1, 2.0**scale_log2, half):
        raise OverflowError(f"a weight gradient left the range of int64 at scale 2^{scale_log2}")


def _matrices(a: Tensor, b: Tensor) -> bool:
    """Whether two matrices have contiguous rows and one dtype."""
    return a.dtype == b.dtype and (a.stride(1) == 1 or a.shape[1] < 2) and (b.stride(1) == 1 or b.shape[1] < 2)


def _storage(t: Tensor, dtype: torch.dtype | None) -> tuple[bool, bool]:
    """Whether operands and result are bf16; each must be that or fp32."""
    if t.dtype not in _STORED_AS_BF16 or dtype not in (None, *_STORED_AS_BF16):
        raise ValueError(f"linear: expected fp32 or bf16, got {t.dtype} for a result in {dtype or t.dtype}")
    return _STORED_AS_BF16[t.dtype], _STORED_AS_BF16[dtype or t.dtype]


def _described(**tensors: Tensor) -> str:
    return ", ".join(f"{name} {t.dtype} {tuple(t.shape)} with strides {t.stride()}" for name, t in tensors.items())


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
        acc = torch.zeros((a.shape[0], b.shape[1]), device=a.device)
        for k in range(i * leaf, min((i + 1) * leaf, a.shape[1])):
            acc = fma_reference(a[:, k, None], b[None, k, :], acc)
        return acc

    leaves = -(-a.shape[1] // leaf)
    tree: Callable[..., Tensor] = reduce.halving
    return tree(0, leaves, chain) if leaves else torch.zeros((a.shape[0], b.shape[1]), device=a.device)

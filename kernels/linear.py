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
    shape, w_shape, strides, w_strides = x.shape, w.shape, x.stride(), w.stride()
    half, half_out = _STORED_AS_BF16.get(x.dtype), _STORED_AS_BF16.get(dtype or x.dtype)
    if (
        len(shape) != 2 or len(w_shape) != 2 or shape[1] != w_shape[1] or leaf < 1 or w.dtype is not x.dtype or half is None
        or half_out is None or not (strides[1] == w_strides[1] == 1 or shape[1] < 2)
    ):  # fmt: skip
        raise ValueError(f"linear.forward: {_described(x=x, w=w)}, leaf {leaf}, result {dtype} don't fit")
    if device.on_gpu(x, w):
        from kernels.gpu import linear as gpu

        return gpu.forward(x, w, leaf, dtype or x.dtype)
    y = x.new_empty((shape[0], w_shape[0]), dtype=dtype)
    operands = x.data_ptr(), strides[0], w.data_ptr(), w_strides[0], y.data_ptr()
    build.library().linear_forward(*operands, shape[0], w_shape[0], shape[1], leaf, half, half_out)
    return y


def input_grad(dy: Tensor, w: Tensor, leaf: int, dtype: torch.dtype | None = None) -> Tensor:
    """dy [M,N], w [N,K], both fp32 or both bf16 -> dy @ w [M,K] in `dtype`; leaves over N. Strides, dtypes and errors as in `forward`."""
    shape, w_shape, strides, w_strides = dy.shape, w.shape, dy.stride(), w.stride()
    half, half_out = _STORED_AS_BF16.get(dy.dtype), _STORED_AS_BF16.get(dtype or dy.dtype)
    if (
        len(shape) != 2 or len(w_shape) != 2 or shape[1] != w_shape[0] or leaf < 1 or w.dtype is not dy.dtype or half is None
        or half_out is None or not _dense_rows(dy, w)
    ):  # fmt: skip
        raise ValueError(f"linear.input_grad: {_described(dy=dy, w=w)}, leaf {leaf}, result {dtype} don't fit")
    if device.on_gpu(dy, w):
        from kernels.gpu import linear as gpu

        return gpu.input_grad(dy, w, leaf, dtype or dy.dtype)
    dx = dy.new_empty((shape[0], w_shape[1]), dtype=dtype)
    operands = dy.data_ptr(), strides[0], w.data_ptr(), w_strides[0], dx.data_ptr()
    build.library().linear_input_grad(*operands, shape[0], shape[1], w_shape[1], leaf, half, half_out)
    return dx


def accumulate_weight_grad(acc: Tensor, dy: Tensor, x: Tensor, tiles: Tensor, scale_log2: int) -> None:
    """acc [N,K] += fixed-point dW of dy [M,N], x [M,K], both fp32 or both bf16, in place.

    tiles: int32/int64 [T+1], row boundaries 0..M of the token leaves. A leaf's dW is a chain over its rows; each element v is added as
    int64(round_half_even(v * 2^scale_log2)), so neither the order of leaves nor their placement on ranks matters.
    OverflowError when |v| * 2^scale_log2 reaches 2^61 or |acc| 2^62, or v is not finite; `acc` is then undefined.
    """
    (m, n), k = dy.shape if dy.dim() == 2 else (-1, 0), x.shape[-1]
    half = _STORED_AS_BF16.get(dy.dtype)
    fits = x.shape == (m, k) and acc.shape == (n, k) and acc.dtype is torch.int64 and acc.is_contiguous()
    if not fits or half is None or x.dtype is not dy.dtype or not _dense_rows(dy, x):
        raise ValueError(f"linear.accumulate_weight_grad: {_described(acc=acc, dy=dy, x=x)} don't fit")
    if device.on_gpu(acc, dy, x):
        from kernels.gpu import linear as gpu

        gpu.accumulate_weight_grad(acc, dy, x, tiles, scale_log2)
        return
    tiles = boundaries(tiles, m)
    operands = acc.data_ptr(), dy.data_ptr(), dy.stride(0), x.data_ptr(), x.stride(0)
    if build.library().linear_weight_grad(*operands, n, k, tiles.data_ptr(), len(tiles) - 1, 2.0**scale_log2, half):
        raise OverflowError(f"a weight gradient left the range of int64 at scale 2^{scale_log2}")


def _dense_rows(*matrices: Tensor) -> bool:
    return all(t.stride(1) == 1 or t.shape[1] < 2 for t in matrices)


def _described(**tensors: Tensor) -> str:
    return ", ".join(f"{name} {t.dtype} {tuple(t.shape)} with strides {t.stride()}" for name, t in tensors.items())


def boundaries(tiles: Tensor, m: int) -> Tensor:
    """Row boundaries of token leaves as contiguous int64. ValueError unless they rise from 0 to m."""
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

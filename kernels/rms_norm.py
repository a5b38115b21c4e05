"""RMS normalisation (Zhang and Sennrich, 2019) of rows, of a hidden state (G = 1) or of every head (G = heads).

A row sum has 16 lanes: lane j is the FMA chain over elements j, j + 16, ... (zeros past the end), then lanes are added 16-8-4-2-1.
x, w, dy, y and dx are fp32 or bf16, one dtype; all arithmetic is fp32, and bf16 results are rounded once, when stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import device, reduce
from kernels.cpu import build
from kernels.elementwise import fma_reference, rsqrt_reference


def forward(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = (x * rstd) * w, rstd = 1 / sqrt(sum(x * x) / D + eps).

    x [M, G, D] or [M, D] (G = 1), stride(-1) == 1, other strides free; w [D]. Returns y of x's shape and dtype, and rstd fp32 [M, G].
    """
    x, layout = _rows(x, w)
    if device.on_gpu(x, w):
        from kernels.gpu import rms_norm as gpu

        return gpu.forward(x, w, eps)
    y = _empty(x)
    rstd = torch.empty(layout[2], layout[3], dtype=torch.float32)
    arguments = (x.data_ptr(), *layout, w.data_ptr(), y.data_ptr(), rstd.data_ptr(), float(eps))
    build.library().rms_norm_forward(x.dtype is torch.bfloat16, *arguments)
    return y, rstd


def backward(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, acc: Tensor | None = None, tiles: Tensor | None = None, scale_log2: int = 0
) -> Tensor:
    """dx of x's shape and dtype; with g = dy * w and n = x * rstd: dx = rstd * fma(-n, sum(g * n) / D, g).

    acc int64 [D] += the gradient of w, in place: for each tile of rows (tiles: 1-D int tensor of boundaries 0 .. M) and each g, the FMA
    chain over the tile's rows of dy * n, as round(value * 2^scale_log2). None: not wanted. OverflowError: a value reaches 2^61 or acc 2^62.
    """
    (x, layout), (dy, dy_layout) = _rows(x, w), _rows(dy, w)
    if dy.shape != x.shape or rstd.dtype != torch.float32 or rstd.shape != layout[2:4] or not rstd.is_contiguous():
        raise ValueError(f"rms_norm: dy {tuple(dy.shape)}, x {tuple(x.shape)}, rstd {rstd.dtype} {tuple(rstd.shape)}")
    if acc is not None and (tiles is None or acc.dtype != torch.int64 or acc.shape != w.shape or not acc.is_contiguous()):
        raise ValueError(f"rms_norm: weight gradient needs tiles and a contiguous int64 accumulator, got {acc.dtype} {tuple(acc.shape)}")
    if device.on_gpu(dy, x, w, rstd, acc):
        from kernels.gpu import rms_norm as gpu

        return gpu.backward(dy, x, w, rstd, acc, tiles, scale_log2)
    dx, lib = _empty(x), build.library()
    tensors = (x.dtype is torch.bfloat16, dy.data_ptr(), *dy_layout[:2], x.data_ptr(), *layout)
    lib.rms_norm_input_grad(*tensors, w.data_ptr(), rstd.data_ptr(), dx.data_ptr())
    if acc is None or tiles is None:
        return dx
    tiles = tiles.to(torch.int64).contiguous()
    arguments = (rstd.data_ptr(), acc.data_ptr(), tiles.data_ptr(), tiles.numel() - 1, 2.0**scale_log2)
    overflow = lib.rms_norm_weight_grad(*tensors, *arguments)
    if overflow == 2:
        raise ValueError(f"rms_norm: tiles must rise within the {len(x)} rows; they end at {int(tiles[-1])}")
    if overflow:
        raise OverflowError(f"norm gradient too large for fixed point with scale 2^{scale_log2}")
    return dx


def _rows(x: Tensor, w: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """x with dense rows; (row stride, group stride, M, G, D)."""
    shape, dtype = x.shape, x.dtype
    if (dtype is not torch.float32 and dtype is not torch.bfloat16) or len(shape) not in (2, 3):
        raise ValueError(f"rms_norm: expected fp32 or bf16 [M, G, D], got {dtype} {tuple(shape)}")
    if w.dtype is not dtype or w.shape != shape[-1:] or not w.is_contiguous():
        raise ValueError(f"rms_norm: x {dtype} {tuple(shape)} needs w {dtype} [{shape[-1]}], got {w.dtype} {tuple(w.shape)}")
    strides = x.stride()
    if strides[-1] != 1:
        x = x.contiguous()
        strides = x.stride()
    if len(shape) == 2:
        return x, (strides[0], 0, shape[0], 1, shape[1])
    return x, (strides[0], strides[1], *shape)


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# --- references --------------------------------------------------------------------------------------------------------------
def forward_reference(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`forward` in plain torch on any device, bit for bit."""
    rows = x if x.dim() == 3 else x[:, None]
    eps32 = torch.tensor(eps, dtype=torch.float32, device=x.device)
    rstd = rsqrt_reference(_row_sum_reference(rows, rows) / x.shape[-1] + eps32)
    return (rows * rstd[..., None] * w).view(x.shape), rstd


def backward_reference(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, acc: Tensor | None = None, tiles: Tensor | None = None, scale_log2: int = 0
) -> Tensor:
    """`backward` in plain torch on any device, bit for bit; a value out of range is not noticed."""
    dys, rows = (t if t.dim() == 3 else t[:, None] for t in (dy, x))
    g, n = dys * w, rows * rstd[..., None]
    mean = _row_sum_reference(g, n) / x.shape[-1]
    if acc is not None and tiles is not None:
        bounds = tiles.tolist()
        for a, b in zip(bounds, bounds[1:]):
            chain = torch.zeros_like(n[0])
            for row in range(a, b):
                chain = fma_reference(dys[row], n[row], chain)
            acc += reduce.to_fixed_reference(chain, scale_log2).sum(0)
    return (rstd[..., None] * fma_reference(-n, mean[..., None], g)).view(x.shape)


def _row_sum_reference(a: Tensor, b: Tensor) -> Tensor:
    """Sum of a * b over the last dim, in 16 lanes."""
    missing = -a.shape[-1] % 16
    a, b = (torch.nn.functional.pad(t, (0, missing)).unflatten(-1, (-1, 16)) for t in (a, b))
    lanes = torch.zeros_like(a[..., 0, :])
    for i in range(a.shape[-2]):
        lanes = fma_reference(a[..., i, :], b[..., i, :], lanes)
    for width in (8, 4, 2, 1):
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    return lanes[..., 0]

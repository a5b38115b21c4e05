"""RMS normalisation (Zhang and Sennrich, 2019) of rows, of a hidden state (G = 1) or of every head (G = heads).

A row sum has 16 lanes: lane j is the FMA chain over elements j, j + 16, ... (zeros past the end), then lanes are added 16-8-4-2-1.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu import build


def forward(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = (x * rstd) * w, rstd = 1 / sqrt(sum(x * x) / D + eps).

    x fp32 [M, G, D] or [M, D] (G = 1), stride(-1) == 1, other strides free; w fp32 [D]. Returns y of x's shape, and rstd [M, G].
    """
    rows = _rows(x, w)
    y = torch.empty(x.shape, dtype=torch.float32)
    rstd = torch.empty(rows.shape[:2], dtype=torch.float32)
    build.library().rms_norm_forward(rows, rows.stride(0), rows.stride(1), *rows.shape, w, ctypes.c_float(eps), y, rstd)
    return y, rstd


def backward(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, acc: Tensor | None = None, tiles: Tensor | None = None, scale_log2: int = 0
) -> Tensor:
    """dx of x's shape; with g = dy * w and n = x * rstd: dx = rstd * fma(-n, sum(g * n) / D, g).

    acc int64 [D] += the gradient of w, in place: for each tile of rows (tiles: 1-D int tensor of boundaries 0 .. M) and each g, the FMA
    chain over the tile's rows of dy * n, as round(value * 2^scale_log2). None: not wanted. OverflowError: a value reaches 2^61 or acc 2^62.
    """
    rows, dys = _rows(x, w), _rows(dy, w)
    if dys.shape != rows.shape or rstd.shape != rows.shape[:2] or not rstd.is_contiguous():
        raise ValueError(f"rms_norm: dy {tuple(dy.shape)}, x {tuple(x.shape)}, rstd {tuple(rstd.shape)}")
    dx = torch.empty(x.shape, dtype=torch.float32)
    tensors = [dys, dys.stride(0), dys.stride(1), rows, rows.stride(0), rows.stride(1), *rows.shape]
    build.library().rms_norm_input_grad(*tensors, w, rstd, dx)
    if acc is None:
        return dx
    if tiles is None or acc.dtype != torch.int64 or acc.shape != w.shape or not acc.is_contiguous():
        raise ValueError(f"rms_norm: weight gradient needs tiles and a contiguous int64 accumulator, got {acc.dtype} {tuple(acc.shape)}")
    tiles = tiles.to(torch.int64).contiguous()
    overflow = build.library().rms_norm_weight_grad(*tensors, rstd, acc, tiles, len(tiles) - 1, 2.0**scale_log2)
    if overflow == 2:
        raise ValueError(f"rms_norm: tiles end at {int(tiles[-1])}, there are {len(rows)} rows")
    if overflow:
        raise OverflowError(f"norm gradient too large for fixed point with scale 2^{scale_log2}")
    return dx


def forward_reference(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Plain torch, in the dtype of x."""
    rows = x if x.dim() == 3 else x[:, None]
    rstd = torch.rsqrt(rows.square().mean(-1) + eps)
    return (rows * rstd[..., None] * w).view(x.shape), rstd


def _rows(x: Tensor, w: Tensor) -> Tensor:
    if x.dtype != torch.float32 or w.dtype != torch.float32 or x.dim() not in (2, 3) or w.shape != x.shape[-1:] or not w.is_contiguous():
        raise ValueError(f"rms_norm: expected fp32 [M, G, D] and [D], got {x.dtype} {tuple(x.shape)} and {w.dtype} {tuple(w.shape)}")
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.dim() == 3 else x[:, None]

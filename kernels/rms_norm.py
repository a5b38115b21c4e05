"""RMS normalisation (Zhang and Sennrich, 2019) of rows, of a hidden state (G = 1) or of every head (G = heads).

A row sum has 16 lanes: lane j is the FMA chain over elements j, j + 16, ... (zeros past the end), then lanes are added 16-8-4-2-1.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels import reduce
from kernels.cpu import build
from kernels.elementwise import fma_reference, rsqrt_reference


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


def _rows(x: Tensor, w: Tensor) -> Tensor:
    if x.dtype != torch.float32 or w.dtype != torch.float32 or x.dim() not in (2, 3) or w.shape != x.shape[-1:] or not w.is_contiguous():
        raise ValueError(f"rms_norm: expected fp32 [M, G, D] and [D], got {x.dtype} {tuple(x.shape)} and {w.dtype} {tuple(w.shape)}")
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.dim() == 3 else x[:, None]


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

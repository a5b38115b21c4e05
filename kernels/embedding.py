"""Token embedding, split by vocabulary rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import reduce
from kernels.cpu import build


def forward(ids: Tensor, w_local: Tensor, first_id: int = 0) -> Tensor:
    """Rows of the table: ids int64 [M], w_local fp32 [V_local, H] with rows first_id .. first_id + V_local -> [M, H].

    Rows of ids that lie elsewhere are +0.0, so ranks complete them by `collectives.sum_disjoint`.
    """
    local = ids.to(torch.int64) - first_id
    owned = (local >= 0) & (local < len(w_local))
    if not len(w_local):
        return w_local.new_zeros(len(ids), w_local.shape[1])
    rows = w_local.index_select(0, local.clamp(0, len(w_local) - 1))
    return rows if bool(owned.all()) else rows.masked_fill_(~owned[:, None], 0.0)


def accumulate_grad(acc: Tensor, ids: Tensor, dx: Tensor, first_id: int, scale_log2: int) -> None:
    """acc int64 [V_local, H] += round(dx * 2^scale_log2) row by row (each token is a leaf), in place. Ids owned elsewhere are skipped.

    dx fp32 [M, H], rows may be strided. OverflowError when a value reaches 2^61 or an accumulator 2^62.
    """
    if acc.dtype != torch.int64 or not acc.is_contiguous() or dx.dtype != torch.float32 or dx.shape != (len(ids), acc.shape[1]):
        raise ValueError(f"embedding: acc {acc.dtype} {tuple(acc.shape)}, dx {dx.dtype} {tuple(dx.shape)}, {len(ids)} ids")
    if dx.numel() == 0:
        return
    dx = dx if dx.stride(1) == 1 else dx.contiguous()
    local = (ids.to(torch.int64) - first_id).contiguous()
    overflow = build.library().embedding_accumulate(acc, len(acc), acc.shape[1], local, len(local), dx, dx.stride(0), 2.0**scale_log2)
    if overflow:
        raise OverflowError(f"embedding gradient too large for fixed point with scale 2^{scale_log2}")


def forward_reference(ids: Tensor, w_local: Tensor, first_id: int = 0) -> Tensor:
    """Plain torch on any device: the rows' bytes."""
    rows = torch.zeros(len(ids), w_local.shape[1], dtype=w_local.dtype, device=w_local.device)
    for i, token in enumerate(ids.tolist()):
        if first_id <= token < first_id + len(w_local):
            rows[i] = w_local[token - first_id]
    return rows


def accumulate_grad_reference(acc: Tensor, ids: Tensor, dx: Tensor, first_id: int, scale_log2: int) -> None:
    """Plain torch on any device, bit for bit; a value out of range is not noticed."""
    for i, row in zip(ids.tolist(), dx, strict=True):
        if first_id <= i < first_id + len(acc):
            acc[i - first_id] += reduce.to_fixed_reference(row, scale_log2)

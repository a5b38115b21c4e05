"""Token embedding, split by vocabulary rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import device, reduce
from kernels.cpu import build


def forward(ids: Tensor, w_local: Tensor, first_id: int = 0) -> Tensor:
    """Rows of the table: ids int [M], w_local fp32 or bf16 [V_local, H] with rows first_id .. first_id + V_local -> [M, H].

    Rows of ids that lie elsewhere are +0.0, so ranks complete them by `collectives.sum_disjoint`.
    """
    vocab, dim = w_local.shape
    if (device.interpreted or not (ids.is_cpu and w_local.is_cpu)) and device.on_gpu(ids, w_local):
        from kernels.gpu import embedding as gpu

        return gpu.forward(ids, w_local, first_id)
    if ids.dtype is not torch.int64 or not ids.is_contiguous():
        ids = ids.to(torch.int64).contiguous()
    if not w_local.is_contiguous():
        w_local = w_local.contiguous()
    rows = ids.numel()
    out = w_local.new_empty(rows, dim)
    row_bytes = dim * w_local.element_size()
    build.library().embedding_forward(w_local.data_ptr(), first_id, vocab, row_bytes, ids.data_ptr(), rows, out.data_ptr())
    return out


def accumulate_grad(acc: Tensor, ids: Tensor, dx: Tensor, first_id: int, scale_log2: int) -> None:
    """acc int64 [V_local, H] += round(dx * 2^scale_log2) row by row (each token is a leaf), in place. Ids owned elsewhere are skipped.

    dx fp32 or bf16 [M, H], rows may be strided. OverflowError when a value reaches 2^61 or an accumulator 2^62.
    """
    (vocab, dim), dtype = acc.shape, dx.dtype
    good = acc.dtype is torch.int64 and acc.is_contiguous() and (dtype is torch.float32 or dtype is torch.bfloat16)
    if not good or dx.shape != (ids.numel(), dim):
        raise ValueError(f"embedding: acc {acc.dtype} {tuple(acc.shape)}, dx {dtype} {tuple(dx.shape)}, {ids.numel()} ids")
    if device.on_gpu(acc, ids, dx):
        from kernels.gpu import embedding as gpu

        gpu.accumulate_grad(acc, ids, dx, first_id, scale_log2)
        return
    if dx.numel() == 0:
        return
    dx = dx if dx.stride(1) == 1 else dx.contiguous()
    ids = ids.to(torch.int64).contiguous()
    arguments = (acc.data_ptr(), first_id, vocab, dim, ids.data_ptr(), ids.numel(), dx.data_ptr(), dx.stride(0), 2.0**scale_log2)
    if build.library().embedding_accumulate(dtype is torch.bfloat16, *arguments):
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

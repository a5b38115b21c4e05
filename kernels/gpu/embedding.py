"""Token embedding and its exact gradient; see `kernels.embedding`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import math

_BLOCK = 512


@triton.jit
def forward_kernel(ids_ptr, w_ptr, out_ptr, first_id, vocab, dim, w_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(ids_ptr + row + i * 0).to(tl.int64) - first_id
    owned = (local >= 0) & (local < vocab)
    value = tl.load(w_ptr + local * w_row + i, mask=(i < dim) & owned, other=0.0)
    tl.store(out_ptr + row * dim + i, tl.where(owned, value, 0.0), mask=i < dim)


@triton.jit
def gradient_kernel(acc_ptr, ids_ptr, dx_ptr, bad_ptr, first_id, vocab, dim, dx_row, scale_log2, BLOCK: tl.constexpr):
    """Tokens that share an id meet in atomic additions: of integers, so their order does not matter."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(ids_ptr + row + i * 0).to(tl.int64) - first_id
    mask = (i < dim) & (local >= 0) & (local < vocab)
    v = tl.load(dx_ptr + row * dx_row + i, mask=mask, other=0.0).to(tl.float32)
    math.add_fixed(acc_ptr + local * dim + i, v, mask, scale_log2, bad_ptr)


def forward(ids: Tensor, w_local: Tensor, first_id: int = 0) -> Tensor:
    """Rows of w_local [V_local, H] -> [M, H]; rows of ids that lie elsewhere are +0.0."""
    w_local = w_local if w_local.stride(1) == 1 else w_local.contiguous()
    dim = w_local.shape[1]
    out = torch.empty((ids.numel(), dim), dtype=w_local.dtype, device=w_local.device)
    if out.numel():
        grid = ids.numel(), triton.cdiv(dim, _BLOCK)
        forward_kernel[grid](ids.contiguous(), w_local, out, first_id, len(w_local), dim, w_local.stride(0), BLOCK=_BLOCK, **math.LAUNCH)
    return out


def accumulate_grad(acc: Tensor, ids: Tensor, dx: Tensor, first_id: int, scale_log2: int) -> None:
    """acc int64 [V_local, H] += fixed(dx) row by row. OverflowError is read back, but not while a graph is recorded."""
    if not dx.numel():
        return
    dx, (vocab, dim) = dx if dx.stride(1) == 1 else dx.contiguous(), acc.shape
    bad = torch.zeros(1, dtype=torch.int32, device=acc.device)
    gradient_kernel[(ids.numel(), triton.cdiv(dim, _BLOCK))](
        acc, ids.contiguous(), dx, bad, first_id, vocab, dim, dx.stride(0), scale_log2, BLOCK=_BLOCK, **math.LAUNCH
    )
    if math.may_read_back(acc) and int(bad):
        raise OverflowError(f"embedding gradient too large for fixed point with scale 2^{scale_log2}")


def compile_cases() -> list:
    from kernels.gpu.ahead_of_time import Case

    cases = []
    for kind in ("fp32", "bf16"):
        signature = {"ids_ptr": "*i64", "w_ptr": f"*{kind}", "out_ptr": f"*{kind}"} | dict.fromkeys(
            ("first_id", "vocab", "dim", "w_row"), "i32"
        )
        cases.append(Case(forward_kernel, kind, signature, {"BLOCK": _BLOCK}, ("ids_ptr", "w_ptr", "out_ptr", "dim", "w_row")))
        pointers = {"acc_ptr": "*i64", "ids_ptr": "*i64", "dx_ptr": f"*{kind}", "bad_ptr": "*i32"}
        signature = pointers | dict.fromkeys(("first_id", "vocab", "dim", "dx_row", "scale_log2"), "i32")
        cases.append(Case(gradient_kernel, kind, signature, {"BLOCK": _BLOCK}, (*pointers, "dim", "dx_row")))
    return cases

"""RMS normalisation: row sums in 16 lanes, exact weight gradients; see `kernels.rms_norm`.

A program holds a few rows. Lane j of a row is a chain over elements j, j + 16, ...: steps of 16 columns, unrolled by 16 so that their
loads are in flight together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import math

_COLUMNS = 256


@triton.jit
def lane_sum(lanes, ROWS: tl.constexpr):
    """[ROWS, 16] -> [ROWS]: lanes halved 16-8-4-2-1, lane i takes lane i + width / 2."""
    for t in tl.static_range(4):
        left, right = tl.split(tl.permute(tl.reshape(lanes, (ROWS, 2, 8 >> t)), (0, 2, 1)))
        lanes = left + right
    return tl.reshape(lanes, (ROWS,))


@triton.jit
def square_step(x_row, lanes, column, mask, D: tl.constexpr):
    x = tl.load(x_row + column[None, :], mask=mask[:, None] & (column < D)[None, :], other=0.0).to(tl.float32)
    return math.fma(x, x, lanes)


@triton.jit
def product_step(dy_row, x_row, w_ptr, rstd, lanes, column, mask, D: tl.constexpr):
    inside = mask[:, None] & (column < D)[None, :]
    g = tl.load(dy_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    g = g * tl.load(w_ptr + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    n = tl.load(x_row + column[None, :], mask=inside, other=0.0).to(tl.float32) * rstd[:, None]
    return math.fma(g, n, lanes)


@triton.jit
def forward_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, eps_ptr, count, groups, x_row, x_group,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = r < count
    row = x_ptr + ((r // groups).to(tl.int64) * x_row + (r % groups).to(tl.int64) * x_group)[:, None]
    lane = tl.arange(0, 16)
    lanes = tl.zeros((ROWS, 16), tl.float32)
    STEPS: tl.constexpr = (D + 15) // 16
    for chunk in range(STEPS // UNROLL):
        for u in tl.static_range(UNROLL):
            lanes = square_step(row, lanes, (chunk * UNROLL + u) * 16 + lane, mask, D)
    for u in tl.static_range(STEPS % UNROLL):
        lanes = square_step(row, lanes, (STEPS // UNROLL * UNROLL + u) * 16 + lane, mask, D)
    rstd = math.rsqrt(math.div(lane_sum(lanes, ROWS), D * 1.0) + tl.load(eps_ptr))
    tl.store(rstd_ptr + r, rstd, mask=mask)
    out = y_ptr + r.to(tl.int64)[:, None] * D
    for c in range(0, D, COLUMNS):
        column = c + tl.arange(0, COLUMNS)
        inside = mask[:, None] & (column < D)[None, :]
        x = tl.load(row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        tl.store(out + column[None, :], math.stored(x * rstd[:, None] * w, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def input_grad_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, count, groups, dy_row, dy_group, x_row, x_group,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = r < count
    m, g = (r // groups).to(tl.int64), (r % groups).to(tl.int64)
    row, gradient = x_ptr + (m * x_row + g * x_group)[:, None], dy_ptr + (m * dy_row + g * dy_group)[:, None]
    rstd = tl.load(rstd_ptr + r, mask=mask, other=0.0)
    lane = tl.arange(0, 16)
    lanes = tl.zeros((ROWS, 16), tl.float32)
    STEPS: tl.constexpr = (D + 15) // 16
    for chunk in range(STEPS // UNROLL):
        for u in tl.static_range(UNROLL):
            lanes = product_step(gradient, row, w_ptr, rstd, lanes, (chunk * UNROLL + u) * 16 + lane, mask, D)
    for u in tl.static_range(STEPS % UNROLL):
        lanes = product_step(gradient, row, w_ptr, rstd, lanes, (STEPS // UNROLL * UNROLL + u) * 16 + lane, mask, D)
    mean = math.div(lane_sum(lanes, ROWS), D * 1.0)
    out = dx_ptr + r.to(tl.int64)[:, None] * D
    for c in range(0, D, COLUMNS):
        column = c + tl.arange(0, COLUMNS)
        inside = mask[:, None] & (column < D)[None, :]
        dy = tl.load(gradient + column[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = dy * tl.load(w_ptr + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        normed = tl.load(row + column[None, :], mask=inside, other=0.0).to(tl.float32) * rstd[:, None]
        dx = rstd[:, None] * math.fma(-normed, tl.broadcast_to(mean[:, None], (ROWS, COLUMNS)), dy)
        tl.store(out + column[None, :], math.stored(dx, dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def weight_grad_kernel(
    dy_ptr, x_ptr, rstd_ptr, acc_ptr, tiles_ptr, bad_ptr, groups, dy_row, dy_group, x_row, x_group, scale_log2,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of rows, one group, BLOCK columns: a chain, then one exact addition."""
    tile, g = tl.program_id(0) // groups, (tl.program_id(0) % groups).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < D
    chain = tl.zeros((BLOCK,), tl.float32)
    first = tl.load(tiles_ptr + tile).to(tl.int64)
    for r in range(tl.load(tiles_ptr + tile + 1).to(tl.int64) - first):
        row = first + r
        dy = tl.load(dy_ptr + row * dy_row + g * dy_group + column, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_row + g * x_group + column, mask=mask, other=0.0).to(tl.float32)
        chain = math.fma(dy, x * tl.load(rstd_ptr + row * groups + g), chain)
    math.add_fixed(acc_ptr + column, chain, mask, scale_log2, bad_ptr)


def forward(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y of x's shape and dtype, rstd fp32 [M, G]."""
    rows, strides = _strides(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty((len(x), rows // max(len(x), 1)), dtype=torch.float32, device=x.device)
    if rows and x.shape[-1]:
        block = _rows_per_program(rows)
        forward_kernel[(triton.cdiv(rows, block),)](
            x, w, y, rstd, _eps(eps, x.device), rows, rstd.shape[1], *strides, D=x.shape[-1], ROWS=block, **_CONSTANTS, **math.LAUNCH
        )
    return y, rstd


def backward(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, acc: Tensor | None = None, tiles: Tensor | None = None, scale_log2: int = 0
) -> Tensor:
    """dx of x's shape and dtype; acc int64 [D] += the gradient of w. OverflowError is read back, but not while a graph is recorded."""
    (rows, x_strides), (_, dy_strides), dim = _strides(x), _strides(dy), x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    groups = rstd.shape[1]
    if not dx.numel():
        return dx
    block = _rows_per_program(rows)
    input_grad_kernel[(triton.cdiv(rows, block),)](
        dy, x, w, rstd, dx, rows, groups, *dy_strides, *x_strides, D=dim, ROWS=block, **_CONSTANTS, **math.LAUNCH
    )
    if acc is None or tiles is None:
        return dx
    bounds = tiles.tolist()
    if bounds[0] < 0 or bounds[-1] > len(x) or sorted(bounds) != bounds:
        raise ValueError(f"rms_norm: tiles must rise within the {len(x)} rows; they end at {bounds[-1]}")
    tiles, bad = tiles.to(acc.device, torch.int32), torch.zeros(1, dtype=torch.int32, device=acc.device)
    weight_grad_kernel[((len(bounds) - 1) * groups, triton.cdiv(dim, 128))](
        dy, x, rstd, acc, tiles, bad, groups, *dy_strides, *x_strides, scale_log2, D=dim, BLOCK=128, num_warps=1, **math.LAUNCH
    )
    if math.may_read_back(acc) and int(bad):
        raise OverflowError(f"norm gradient too large for fixed point with scale 2^{scale_log2}")
    return dx


_CONSTANTS = {"COLUMNS": _COLUMNS, "UNROLL": 16, "num_warps": 4}


def _rows_per_program(rows: int) -> int:
    """Enough programs for every multiprocessor first, then as many rows as fill a warp's loads."""
    return 1 if rows <= 264 else 8


def _strides(x: Tensor) -> tuple[int, tuple[int, int]]:
    """Number of row-groups, (row stride, group stride)."""
    return (len(x), (x.stride(0), 0)) if x.dim() == 2 else (x.shape[0] * x.shape[1], (x.stride(0), x.stride(1)))


_EPS: dict[tuple[float, torch.device], Tensor] = {}


def _eps(eps: float, device: torch.device) -> Tensor:
    """eps as an fp32 number in the device's memory: rounded once, and no copy while a graph is recorded."""
    if (eps, device) not in _EPS:
        _EPS[eps, device] = torch.tensor(eps, dtype=torch.float32).to(device)
    return _EPS[eps, device]


def compile_cases() -> list:
    from kernels.gpu.ahead_of_time import Case

    cases = []
    constants = {"COLUMNS": _COLUMNS, "UNROLL": 16}
    for kind in ("fp32", "bf16"):
        for dim in (128, 1024):
            pointers = {"x_ptr": f"*{kind}", "w_ptr": f"*{kind}", "y_ptr": f"*{kind}", "rstd_ptr": "*fp32", "eps_ptr": "*fp32"}
            signature = pointers | dict.fromkeys(("count", "groups", "x_row", "x_group"), "i32")
            cases.append(
                Case(forward_kernel, f"{kind} D={dim}", signature, {"D": dim, "ROWS": 8, **constants}, (*pointers, "x_row", "x_group"))
            )
            pointers = {"dy_ptr": f"*{kind}", "x_ptr": f"*{kind}", "w_ptr": f"*{kind}", "rstd_ptr": "*fp32", "dx_ptr": f"*{kind}"}
            strides = ("dy_row", "dy_group", "x_row", "x_group")
            signature = pointers | dict.fromkeys(("count", "groups", *strides), "i32")
            cases.append(Case(input_grad_kernel, f"{kind} D={dim}", signature, {"D": dim, "ROWS": 8, **constants}, (*pointers, *strides)))
            pointers = {
                "dy_ptr": f"*{kind}", "x_ptr": f"*{kind}", "rstd_ptr": "*fp32", "acc_ptr": "*i64", "tiles_ptr": "*i32", "bad_ptr": "*i32"
            }  # fmt: skip
            signature = pointers | dict.fromkeys(("groups", *strides, "scale_log2"), "i32")
            cases.append(
                Case(weight_grad_kernel, f"{kind} D={dim}", signature, {"D": dim, "BLOCK": 128}, (*pointers, *strides), {"num_warps": 1})
            )
    return cases

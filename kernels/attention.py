"""Causal attention, forward and backward, over packed sequences and key/value caches: one result for prefill, chunked prefill, decoding
and any split of the rows over ranks.

Keys are cut in leaves of `kv_leaf` absolute positions. A leaf has its own exact maximum m, its sum l = sum exp(s - m) and its output
o = sum exp(s - m) v, each one chain over the keys; leaves are merged on the tree aligned to powers of two, which skips absent leaves, so
that its nodes never change as a sequence grows (the online softmax of Milakov and Gimelshein, 2018, on a fixed tree). dq sums over the
same leaves; dk and dv over tiles of `token_leaf` query positions. A result never has a negative zero. Inputs are assumed finite.

Shapes: M query rows, Hq query heads, R key rows, Hkv key/value heads (Hq a multiple), D head dim, S sequences. q, k, v, o, do, dq, dk, dv
are fp32 or bf16, all of one dtype; arithmetic, m, l and delta are fp32, and a bf16 result is the fp32 result of the widened inputs,
rounded once.
    seqs   int64 [S,4] = (q_start, q_stop, k_start, k_len): query rows [q_start, q_stop) see key rows k_start .. k_start + k_len - 1,
           whose absolute positions are 0 .. k_len - 1
    q_pos  int32 or int64 [M], absolute positions; a query sees the keys at positions <= its own. At least one.
    k, v   [R,Hkv,D] with any row and head strides and a contiguous last dim: packed tensors or caches
ValueError names what doesn't fit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import device, elementwise, reduce
from kernels.cpu import build
from kernels.elementwise import fma_reference

_FAULTS = {
    1: "a sequence (q_start, q_stop, k_start, k_len) leaves the rows of q or k",
    2: "a query row sees no key (negative position, or no keys)",
    3: "query positions must rise within a sequence",
    4: "the block table has too few pages for a sequence, or names a page outside k",
}


def forward(
    q: Tensor, k: Tensor, v: Tensor, seqs: Tensor, q_pos: Tensor, scale: float, kv_leaf: int,
    block_table: Tensor | None = None, page_size: int = 0, max_len: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q [M,Hq,D] -> o [M,Hq,D], and for the backward pass m, l [M,Hq]: maximum score and sum exp(s - m). Rows of no sequence are zero.

    With a block table, int32 [S, max pages], k and v hold pages: position p of sequence s lies in row
    block_table[s, p // page_size] * page_size + p % page_size, and k_start is ignored. Pages need no relation to leaves and change no bit.
    max_len, a bound on every k_len, changes no bit either: with it a GPU's launch is planned without reading `seqs`, as recording a
    CUDA graph demands. On a GPU the values of seqs, q_pos and the table are not checked.
    """
    _check_shapes(q, k, v, seqs, q_pos, kv_leaf)
    if block_table is not None:
        _check_table(block_table, page_size, seqs)
    if device.on_gpu(q, k, v, seqs, q_pos, block_table):
        from kernels.gpu import attention as gpu

        return gpu.forward(q, k, v, seqs, q_pos, scale, kv_leaf, block_table, page_size, max_len)
    (rows, q_heads, head_dim), half = q.shape, q.dtype is torch.bfloat16
    q, seqs, q_pos = q.float().contiguous(), _int64(seqs), _int64(q_pos)
    table, pages = (0, 0) if block_table is None else (block_table.data_ptr(), block_table.shape[1])
    o, m, norm = torch.empty_like(q), q.new_empty((rows, q_heads)), q.new_empty((rows, q_heads))
    fault = build.library().attention_forward(
        q.data_ptr(), *_cache(k), *_cache(v), half, seqs.data_ptr(), len(seqs), q_pos.data_ptr(), rows, k.shape[0], q_heads, k.shape[1],
        head_dim, float(scale), kv_leaf, table, pages, page_size, o.data_ptr(), m.data_ptr(), norm.data_ptr(),
    )  # fmt: skip
    if fault:
        raise ValueError(_FAULTS[fault])
    return (o.bfloat16() if half else o), m, norm


def backward_q(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, m: Tensor, norm: Tensor, seqs: Tensor, q_pos: Tensor, scale: float, kv_leaf: int
) -> tuple[Tensor, Tensor]:
    """Gradient do [M,Hq,D] of the output o; m and norm (l) of `forward` -> dq [M,Hq,D], delta [M,Hq] = sum_d do * o."""
    _check_shapes(q, k, v, seqs, q_pos, kv_leaf)
    _check_rows(q, do, o, m, norm)
    if device.on_gpu(q, k, v, do, o, m, norm, seqs, q_pos):
        from kernels.gpu import attention as gpu

        return gpu.backward_q(do, q, k, v, o, m, norm, seqs, q_pos, scale, kv_leaf)
    dtype = q.dtype
    do, q, o, m, norm = (t.float().contiguous() for t in (do, q, o, m, norm))
    k, v = k.float(), v.float()
    seqs, q_pos = _checked(q, k, seqs, q_pos)
    dq, delta = torch.zeros_like(q), q.new_zeros(q.shape[:2])
    lib = build.library()
    lib.attention_backward_q(
        do, q, *_cache(k), *_cache(v), o, m, norm, seqs, len(seqs), q_pos, *_heads(q, k), float(scale), kv_leaf, dq, delta
    )  # fmt: skip
    return dq.to(dtype), delta


def backward_kv(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, m: Tensor, norm: Tensor, delta: Tensor,
    seqs: Tensor, q_pos: Tensor, k_ranges: Tensor, scale: float, token_leaf: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dk, dv [total,Hkv,D] of the keys k_ranges int64 [J,3] = (sequence, a, b): absolute positions [a, b), in that order.

    The query rows must hold every row of those sequences that sees a key, with rising positions (context parallelism gathers them).
    Leaf: the rows of a query tile, chained over (head of the group, row).
    """
    _check_shapes(q, k, v, seqs, q_pos, token_leaf)
    _check_rows(q, do, q, m, norm, delta)
    if device.on_gpu(q, k, v, do, m, norm, delta, seqs, q_pos):
        from kernels.gpu import attention as gpu

        return gpu.backward_kv(do, q, k, v, m, norm, delta, seqs, q_pos, k_ranges, scale, token_leaf)
    dtype = q.dtype
    do, q, m, norm, delta = (t.float().contiguous() for t in (do, q, m, norm, delta))
    k, v = k.float(), v.float()
    seqs, q_pos = _checked(q, k, seqs, q_pos, rising=True)
    k_ranges = k_ranges.to(torch.int64).contiguous().reshape(-1, 3)
    lengths = seqs[:, 3].tolist()
    for sequence, a, b in k_ranges.tolist():
        if not 0 <= sequence < len(lengths) or not 0 <= a <= b <= lengths[sequence]:
            raise ValueError(f"k_ranges: ({sequence}, {a}, {b}) is no range of keys")
    dk = k.new_zeros((int((k_ranges[:, 2] - k_ranges[:, 1]).sum()), *k.shape[1:]))
    dv = torch.zeros_like(dk)
    build.library().attention_backward_kv(
        do, q, *_cache(k), *_cache(v), m, norm, delta, seqs, len(seqs), q_pos, k_ranges, len(k_ranges), *_heads(q, k), float(scale),
        token_leaf, dk, dv,
    )  # fmt: skip
    return dk.to(dtype), dv.to(dtype)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, seqs: Tensor, q_pos: Tensor, leaf: int) -> None:
    dtype = q.dtype
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 3 or t.dtype not in (torch.float32, torch.bfloat16) or (t.stride(2) != 1 and t.shape[2] > 1):
            got = f"{t.dtype} {tuple(t.shape)}"
            raise ValueError(f"{name}: expected fp32 or bf16 [rows, heads, head dim] with a contiguous last dim, got {got}")
    if k.dtype is not dtype or v.dtype is not dtype:
        raise ValueError(f"q {dtype}, k {k.dtype} and v {v.dtype} don't fit")
    (rows, q_heads, head_dim), (_, kv_heads, k_dim) = q.shape, k.shape
    if k.shape != v.shape or head_dim != k_dim or kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} don't fit")
    if seqs.dim() != 2 or seqs.shape[1] != 4 or q_pos.dim() != 1 or len(q_pos) != rows or leaf < 1:
        raise ValueError(f"seqs {tuple(seqs.shape)}, q_pos {tuple(q_pos.shape)} or leaf {leaf} don't fit q {tuple(q.shape)}")


def _check_table(table: Tensor, page_size: int, seqs: Tensor) -> None:
    if table.dtype is not torch.int32 or table.dim() != 2 or len(table) != len(seqs) or not table.is_contiguous() or page_size < 1:
        raise ValueError(
            f"expected a contiguous int32 block table [{len(seqs)}, max pages] and pages of at least one row, got {table.dtype} "
            f"{tuple(table.shape)} and {page_size}"
        )


def _checked(q: Tensor, k: Tensor, seqs: Tensor, q_pos: Tensor, rising: bool = False) -> tuple[Tensor, Tensor]:
    seqs, q_pos = _int64(seqs), _int64(q_pos)
    fault = build.library().attention_check(seqs, len(seqs), q_pos, q.shape[0], k.shape[0], rising)
    if fault:
        raise ValueError(_FAULTS[fault])
    return seqs, q_pos


def _check_rows(q: Tensor, do: Tensor, o: Tensor, *stats: Tensor) -> None:
    if do.shape != q.shape or o.shape != q.shape or any(t.shape != q.shape[:2] for t in stats):
        raise ValueError(f"the forward pass's tensors don't fit q {tuple(q.shape)}")
    if do.dtype != q.dtype or o.dtype != q.dtype or any(t.dtype != torch.float32 for t in stats):
        raise ValueError(f"the forward pass's tensors: expected {q.dtype}, and fp32 for m, l and delta")


def _int64(t: Tensor) -> Tensor:
    return t.to(torch.int64).contiguous()


def _cache(t: Tensor) -> tuple[int, int, int]:
    return t.data_ptr(), t.stride(0), t.stride(1)


def _heads(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    return q.shape[1], k.shape[1], q.shape[2]


# --- references: the same chains and trees in plain torch, bit for bit; they loop over rows and heads, so for tiny shapes -----------------
def _chain(a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """Chain over dim 0 of a [T,...] * b [T,...]."""
    acc = torch.zeros(torch.broadcast_shapes(a.shape[1:], b.shape[1:])) if start is None else start
    for x, y in zip(a, b):
        acc = fma_reference(x, y, acc)
    return acc


def _merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Nodes (m [], (l, o) [1 + D])."""
    m = torch.maximum(a[0], b[0])
    wa, wb = elementwise.exp_reference(a[0] - m), elementwise.exp_reference(b[0] - m)
    return m, fma_reference(b[1], wb, a[1] * wa) + 0.0


def _row_heads(q: Tensor, k: Tensor, seqs: Tensor, q_pos: Tensor):
    """(sequence, row, query head, kv head, key rows that it sees)."""
    group = q.shape[1] // k.shape[1]
    for s, (q_start, q_stop, k_start, k_len) in enumerate(seqs.tolist()):
        for row in range(q_start, q_stop):
            for head in range(q.shape[1]):
                yield s, row, head, head // group, slice(k_start, k_start + min(k_len, int(q_pos[row]) + 1))


def forward_reference(
    q: Tensor, k: Tensor, v: Tensor, seqs: Tensor, q_pos: Tensor, scale: float, kv_leaf: int
) -> tuple[Tensor, Tensor, Tensor]:
    o, m, norm = torch.zeros_like(q), torch.zeros(q.shape[:2]), torch.zeros(q.shape[:2])
    for _, row, head, kv_head, keys in _row_heads(q, k, seqs, q_pos):
        leaves = {}
        for i, (kl, vl) in enumerate(zip(k[keys, kv_head].split(kv_leaf), v[keys, kv_head].split(kv_leaf))):
            s = _chain(q[row, head][:, None], kl.t()) * torch.tensor(scale)
            p = elementwise.exp_reference(s - s.max())
            leaves[i] = s.max(), _chain(p[:, None], torch.cat((torch.ones(len(p), 1), vl), 1)) + 0.0
        m[row, head], sums = reduce.aligned(leaves, _merge)
        norm[row, head], o[row, head] = sums[0], sums[1:] / sums[0]
    return o, m, norm


def _p_and_ds(q: Tensor, k: Tensor, v: Tensor, do: Tensor, m: Tensor, norm: Tensor, delta: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One row-head q, do [D] against keys k, v [T,D]."""
    p = elementwise.exp_reference(_chain(q[:, None], k.t()) * torch.tensor(scale) - m) * (1.0 / norm)
    return p, p * (_chain(do[:, None], v.t()) - delta) * torch.tensor(scale)


def backward_q_reference(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, m: Tensor, norm: Tensor, seqs: Tensor, q_pos: Tensor, scale: float, kv_leaf: int
) -> tuple[Tensor, Tensor]:
    dq, delta = torch.zeros_like(q), torch.zeros(q.shape[:2])
    for _, row, head, kv_head, keys in _row_heads(q, k, seqs, q_pos):
        delta[row, head] = _chain(do[row, head], o[row, head])
        rest = do[row, head], m[row, head], norm[row, head], delta[row, head], scale
        _, ds = _p_and_ds(q[row, head], k[keys, kv_head], v[keys, kv_head], *rest)
        leaves = zip(ds.split(kv_leaf), k[keys, kv_head].split(kv_leaf))
        dq[row, head] = reduce.aligned({i: _chain(d[:, None], kl) + 0.0 for i, (d, kl) in enumerate(leaves)})
    return dq, delta


def backward_kv_reference(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, m: Tensor, norm: Tensor, delta: Tensor,
    seqs: Tensor, q_pos: Tensor, k_ranges: Tensor, scale: float, token_leaf: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    group, dk, dv = q.shape[1] // k.shape[1], [], []
    for sequence, a, b in k_ranges.tolist():
        q_start, q_stop, k_start, _ = seqs[sequence].tolist()
        for key in range(a, b):
            for kv_head in range(k.shape[1]):
                leaves: dict[int, Tensor] = {}
                for head in range(kv_head * group, (kv_head + 1) * group):
                    for row in (r for r in range(q_start, q_stop) if q_pos[r] >= key):
                        tile = int(q_pos[row]) // token_leaf
                        rest = do[row, head], m[row, head], norm[row, head], delta[row, head], scale
                        at = slice(k_start + key, k_start + key + 1)
                        p, ds = _p_and_ds(q[row, head], k[at, kv_head], v[at, kv_head], *rest)
                        terms = torch.stack((ds * torch.ones(q.shape[2]), p * torch.ones(q.shape[2])))
                        leaves[tile] = fma_reference(terms, torch.stack((q[row, head], do[row, head])), leaves.get(tile, torch.zeros(())))
                total = reduce.aligned({i: x + 0.0 for i, x in leaves.items()}) if leaves else torch.zeros(2, q.shape[2])
                dk.append(total[0])
                dv.append(total[1])
    shape = (-1, *k.shape[1:])
    return torch.stack(dk).reshape(shape), torch.stack(dv).reshape(shape)

"""Our kernels as autograd functions (case R): every sum is a fixed tree or an exact integer sum.

Weight gradients do not travel through autograd: they are added as int64 fixed point into `Parallel.grads`, under the
parameter's name, one token leaf at a time. Shape legend: M rows, K in-features, N out-features, H query heads, G key/value
heads, D head dim, V vocabulary slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function

from kernels import attention, collectives, embedding, linear, logprob, rms_norm, rope, swiglu
from stages.batch import TokenBatch
from stages.parallel import Axis, Parallel


class _Untracked:
    """Stands in for autograd's context where nothing will be differentiated."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        pass


def _apply(function: type[Function], *args):
    """function.apply; without gradients its forward alone: a decode step makes hundreds of calls, each cheaper than `apply` is."""
    return function.apply(*args) if torch.is_grad_enabled() else function.forward(_Untracked(), *args)


def _accumulate_linear(par: Parallel, weight: Tensor, dy: Tensor, x: Tensor, tiles: Tensor) -> None:
    with par.accumulator(weight) as acc:
        linear.accumulate_weight_grad(acc, dy, x, tiles, par.numerics.grad_scale_log2)


def _partials(axis: Axis, par: Parallel, compute) -> tuple[list, Tensor, int]:
    """One partial per maximal node of this rank; compute(start, stop) takes element offsets inside the rank's slice."""
    first = axis.ranges[par.mesh.t][0]
    spans = [((lo - first) * axis.leaf, (hi - first) * axis.leaf) for lo, hi in axis.nodes[par.mesh.t]]
    return axis.nodes, torch.stack([compute(a, b) for a, b in spans]), axis.count


def _dx(dy: Tensor, w: Tensor, leaf: int) -> Tensor:
    return linear.input_grad(dy, w, leaf, torch.float32)


class _Column(Function):
    """Linears that share their input; their out-features are split over tensor-parallel ranks."""

    @staticmethod
    def forward(ctx, par, tiles, leaf, axes, x, *weights):
        ctx.par, ctx.tiles, ctx.axes = par, tiles, axes
        ctx.save_for_backward(x, *weights)
        return tuple(linear.forward(x, par.stored(w), leaf) for w in weights)

    @staticmethod
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        par, parts = ctx.par, []
        for axis, w, dy in zip(ctx.axes, weights, dys):
            dy, stored = dy.contiguous(), par.stored(w)
            _accumulate_linear(par, w, dy, x, ctx.tiles)
            parts.append(_partials(axis, par, lambda a, b, dy=dy, w=stored, axis=axis: _dx(dy[:, a:b], w[a:b], axis.leaf)))
        dx, *rest = collectives.tree_all_reduce(parts, par.mesh.tp_group)
        for r in rest:  # a fixed order of the linears: (q + k) + v, gate + up
            dx = dx + r
        return None, None, None, None, dx.to(x.dtype), *(par.placeholder(w) for w in weights)


class _Row(Function):
    """A linear whose in-features are split over tensor-parallel ranks."""

    @staticmethod
    def forward(ctx, par, tiles, axis, leaf_out, x, w):
        ctx.par, ctx.tiles, ctx.leaf_out = par, tiles, leaf_out
        ctx.save_for_backward(x, w)
        stored = par.stored(w)
        if par.mesh.tp_group is None:  # one rank holds the whole tree
            return linear.forward(x, stored, axis.leaf)
        part = _partials(axis, par, lambda a, b: linear.forward(x[:, a:b], stored[:, a:b], axis.leaf, torch.float32))
        return collectives.tree_all_reduce([part], par.mesh.tp_group)[0].to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        _accumulate_linear(ctx.par, w, dy, x, ctx.tiles)
        return None, None, None, None, linear.input_grad(dy, ctx.par.stored(w), ctx.leaf_out), ctx.par.placeholder(w)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx, par, tiles, eps, x, w):
        y, rstd = rms_norm.forward(x, par.stored(w), eps)
        ctx.par, ctx.tiles = par, tiles
        ctx.save_for_backward(x, w, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, rstd = ctx.saved_tensors
        par = ctx.par
        with par.accumulator(w) as acc:
            dx = rms_norm.backward(dy.contiguous(), x, par.stored(w), rstd, acc, ctx.tiles, par.numerics.grad_scale_log2)
        return None, None, None, dx, par.placeholder(w)


class _Rope(Function):
    @staticmethod
    def forward(ctx, x, positions, cos, sin):
        ctx.tables = positions, cos, sin
        return rope.apply(x, positions, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        return rope.apply(dy.contiguous(), *ctx.tables, inverse=True), None, None, None


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return swiglu.forward(gate, up)

    @staticmethod
    def backward(ctx, dy):
        return swiglu.backward(dy.contiguous(), *ctx.saved_tensors)


class _Embedding(Function):
    @staticmethod
    def forward(ctx, par, ids, w):
        ctx.par, ctx.ids, ctx.weight = par, ids, w
        rows = embedding.forward(ids, w, par.first_token_id).float()  # bit patterns are added as 32-bit integers
        return collectives.sum_disjoint(rows, par.mesh.tp_group).to(par.dtype)

    @staticmethod
    def backward(ctx, dx):
        par, w = ctx.par, ctx.weight
        with par.accumulator(w) as acc:
            embedding.accumulate_grad(acc, ctx.ids, dx.contiguous(), par.first_token_id, par.numerics.grad_scale_log2)
        return None, None, par.placeholder(w)


class _Attention(Function):
    """Causal attention of packed samples. Under context parallelism every rank gathers keys and values forward, and queries and
    their statistics backward, and then computes exactly the rows that it owns: no gradient is ever summed over ranks."""

    @staticmethod
    def forward(ctx, par, batch, scale, q, k, v):
        k, v = gather_rows(batch, par, k, v)
        o, m, norm = attention.forward(q, k, v, batch.seqs, batch.positions, scale, par.numerics.kv_leaf)
        ctx.par, ctx.batch, ctx.scale = par, batch, scale
        ctx.save_for_backward(q, k, v, o, m, norm)
        return o

    @staticmethod
    def backward(ctx, do):
        par, batch, scale, n = ctx.par, ctx.batch, ctx.scale, ctx.par.numerics
        q, k, v, o, m, norm = ctx.saved_tensors
        do = do.contiguous()
        dq, delta = attention.backward_q(do, q, k, v, o, m, norm, batch.seqs, batch.positions, scale, n.kv_leaf)
        do, q, m, norm, delta = gather_rows(batch, par, do, q, m, norm, delta)
        dk, dv = attention.backward_kv(
            do, q, k, v, m, norm, delta, batch.whole_seqs, batch.whole_positions, batch.key_ranges, scale, n.token_leaf
        )
        return None, None, None, dq, dk, dv


def gather_rows(batch: TokenBatch, par: Parallel, *tensors: Tensor) -> list[Tensor]:
    """Rows of all context-parallel ranks in (sample, position) order, in one exchange."""
    if batch.cp_order is None:
        return list(tensors)
    whole = collectives.all_gather_rows(tensors, batch.cp_counts, par.mesh.cp_group)
    return [rows[batch.cp_order] for rows in whole]


class _Logprob(Function):
    """Head, log-softmax, logprob of the target and entropy in one: full logits never exist."""

    @staticmethod
    def forward(ctx, par, batch, inv_temp, h, w):
        n, axis, group = par.numerics, par.vocab, par.mesh.tp_group
        nodes, stored = axis.nodes, par.stored(w)
        stats, target = logprob.partials(
            h, stored, batch.head_targets, inv_temp, n.k_leaf, n.vocab_leaf, par.first_token_id, nodes[par.mesh.t]
        )
        stats = collectives.tree_all_reduce([(nodes, stats, axis.count, logprob.merge)], group)[0]
        logp, entropy, lse = logprob.finish(stats, collectives.sum_disjoint(target, group))
        ctx.par, ctx.batch, ctx.inv_temp = par, batch, inv_temp
        ctx.save_for_backward(h, w, lse, entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, g_logp, g_entropy):
        par, batch, n = ctx.par, ctx.batch, ctx.par.numerics
        h, w, lse, entropy = ctx.saved_tensors
        nodes = par.vocab.nodes
        with par.accumulator(w) as acc:
            dh = logprob.backward(
                h, par.stored(w), batch.head_targets, lse, entropy, g_logp.contiguous(), g_entropy.contiguous(), ctx.inv_temp,
                n.k_leaf, n.vocab_leaf, par.first_token_id, nodes[par.mesh.t],
                acc, batch.head_tiles, n.grad_scale_log2,
            )  # fmt: skip
        dh = collectives.tree_all_reduce([(nodes, dh, par.vocab.count)], par.mesh.tp_group)[0]
        return None, None, None, dh.to(h.dtype), par.placeholder(w)


class LockstepOps:
    """The operations of one module, by our kernels."""

    implementation = "lockstep"

    def __init__(self, par: Parallel):
        self.par = par

    def column(self, x: Tensor, weights: Sequence[Tensor], axes: Sequence[Axis], tiles: Tensor) -> tuple[Tensor, ...]:
        """x [M,K] through weights [N_i,K] -> [M,N_i] each."""
        return _apply(_Column, self.par, tiles, self.par.numerics.k_leaf, axes, x, *weights)

    def row(self, x: Tensor, weight: Tensor, axis: Axis, tiles: Tensor) -> Tensor:
        """x [M,K slice] through weight [N, K slice] -> [M,N], summed over tensor-parallel ranks."""
        return _apply(_Row, self.par, tiles, axis, self.par.numerics.k_leaf, x, weight)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return _apply(_SwiGLU, gate, up)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, batch: TokenBatch, scale: float) -> Tensor:
        """q [M,H,D], k and v [M,G,D] of the rank's rows -> [M,H,D]."""
        return _apply(_Attention, self.par, batch, scale, q, k, v)

    def cached_attention(self, q: Tensor, k: Tensor, v: Tensor, seqs: Tensor, positions: Tensor, scale: float, max_len: int) -> Tensor:
        """q [M,H,D] against a cache k, v [rows,G,D] of sequences of at most max_len keys; `seqs` as in kernels.attention."""
        return attention.forward(q, k, v, seqs, positions, scale, self.par.numerics.kv_leaf, max_len=max_len)[0]

    def logprob(self, h: Tensor, w: Tensor, batch: TokenBatch, inv_temp: float) -> tuple[Tensor, Tensor]:
        """h [H,K] -> logprob of batch.head_targets [H], entropy [H]."""
        return _apply(_Logprob, self.par, batch, inv_temp, h, w)

    def logits(self, h: Tensor, w: Tensor) -> Tensor:
        """h [M,K] -> the rank's slice of the logits [M,V]."""
        return linear.forward(h, self.par.stored(w), self.par.numerics.k_leaf, torch.float32)

    def logprob_of(self, logits: Tensor, targets: Tensor, inv_temp: float) -> Tensor:
        """Whole logits [M,V], targets [M] -> logprobs [M], the same bits as `logprob`."""
        count = self.par.vocab.count
        stats, target = logprob.partials_from_logits(logits, targets, inv_temp, self.par.numerics.vocab_leaf, 0, [(0, count)])
        return logprob.finish(stats[0], target)[0]


def embed(par: Parallel, ids: Tensor, weight: Tensor) -> Tensor:
    """ids [M] -> [M,K] from a vocabulary-parallel table."""
    return _apply(_Embedding, par, ids, weight)


def norm(par: Parallel, x: Tensor, weight: Tensor, eps: float, tiles: Tensor) -> Tensor:
    """RMSNorm over the last dim; x [M,K] or [M,H,D] with weight [K] or [D]."""
    grouped = x if x.dim() == 3 else x[:, None, :]
    return _apply(_RMSNorm, par, tiles, eps, grouped, weight).reshape(x.shape)


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [M,H,D] at absolute positions [M]."""
    return _apply(_Rope, x, positions, cos, sin)


def gather_vocab(par: Parallel, part: Tensor) -> Tensor:
    """Whole logits [M,V] from the tensor-parallel ranks' slices."""
    if par.mesh.tp_group is None:
        return part
    return collectives.all_gather_rows(part.t().contiguous(), par.vocab.widths, par.mesh.tp_group).t().contiguous()

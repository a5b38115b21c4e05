"""PyTorch's own kernels (case P) behind the same operations: matmul, scaled_dot_product_attention, log_softmax, float all-reduce.

The control of the experiment: what an ordinary trainer computes. Its bits depend on the layout, and the comparison must say so.
Weight gradients travel through autograd to `param.grad`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from stages.batch import TokenBatch
from stages.lockstep_ops import gather_vocab
from stages.parallel import Axis, Parallel


class _CopyToRanks(Function):
    """Identity forward, float sum of the gradients backward: the entrance of a column-parallel region."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.clone()
        dist.all_reduce(dx, group=ctx.group)
        return dx, None


class _SumOverRanks(Function):
    """Float sum forward, identity backward: the exit of a row-parallel region."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, dx):
        return dx, None


class _GatherVocab(Function):
    """Whole logits [M,V] from the ranks' slices; backward keeps the own slice."""

    @staticmethod
    def forward(ctx, part, par):
        widths, t = par.vocab.widths, par.mesh.t
        ctx.span = sum(widths[:t]), sum(widths[: t + 1])
        return gather_vocab(par, part)

    @staticmethod
    def backward(ctx, d):
        return d[:, slice(*ctx.span)].contiguous(), None


class _GatherKeys(Function):
    """Rows of all context-parallel ranks in (sample, position) order; backward sums floats over ranks and keeps the own rows."""

    @staticmethod
    def forward(ctx, x, group, counts, order, c):
        ctx.group, ctx.order, ctx.own = group, order, (sum(counts[:c]), sum(counts[: c + 1]))
        most = max(counts)
        padded = F.pad(x, (0, 0, 0, 0, 0, most - len(x)))
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([p[:n] for p, n in zip(parts, counts)])[order]

    @staticmethod
    def backward(ctx, d):
        d = d.contiguous()
        dist.all_reduce(d, group=ctx.group)
        ranks_rows = torch.empty_like(d)
        ranks_rows[ctx.order] = d
        return ranks_rows[slice(*ctx.own)], None, None, None, None


class TorchOps:
    """The operations of one module, by PyTorch. Signatures as in `LockstepOps`."""

    implementation = "torch"

    def __init__(self, par: Parallel):
        self.par = par

    def _enter(self, x: Tensor) -> Tensor:
        group = self.par.mesh.tp_group
        return x if group is None else _CopyToRanks.apply(x, group)

    def column(self, x: Tensor, weights: Sequence[Tensor], axes: Sequence[Axis], tiles: Tensor) -> tuple[Tensor, ...]:
        x = self._enter(x)
        return tuple(F.linear(x, w.to(x.dtype)) for w in weights)

    def row(self, x: Tensor, weight: Tensor, axis: Axis, tiles: Tensor) -> Tensor:
        y, group = F.linear(x, weight.to(x.dtype)), self.par.mesh.tp_group
        return y if group is None else _SumOverRanks.apply(y, group)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def attention(self, q: Tensor, k: Tensor, v: Tensor, batch: TokenBatch, scale: float) -> Tensor:
        if batch.cp_order is not None:
            mesh = self.par.mesh
            k, v = (_GatherKeys.apply(x, mesh.cp_group, batch.cp_counts, batch.cp_order, mesh.c) for x in (k, v))
        return self.cached_attention(q, k, v, batch.seqs, batch.positions, scale, 0)

    def cached_attention(self, q: Tensor, k: Tensor, v: Tensor, seqs: Tensor, positions: Tensor, scale: float, max_len: int) -> Tensor:
        outputs = []
        for q0, q1, k0, length in seqs.tolist():
            heads = [x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0 : k0 + length], v[k0 : k0 + length])]
            visible = torch.arange(length)[None, :] <= positions[q0:q1, None]
            o = F.scaled_dot_product_attention(*heads, attn_mask=visible, scale=scale, enable_gqa=True)
            outputs.append(o[0].transpose(0, 1))
        return torch.cat(outputs) if outputs else q * 0.0

    def logprob(self, h: Tensor, w: Tensor, batch: TokenBatch, inv_temp: float) -> tuple[Tensor, Tensor]:
        logits = F.linear(self._enter(h), w.to(h.dtype)).float()
        if self.par.mesh.tp_group is not None:
            logits = _GatherVocab.apply(logits, self.par)
        logp = torch.log_softmax(logits * inv_temp, dim=-1)
        return logp.gather(1, batch.head_targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def logits(self, h: Tensor, w: Tensor) -> Tensor:
        return F.linear(h, w.to(h.dtype)).float()

    def logprob_of(self, logits: Tensor, targets: Tensor, inv_temp: float) -> Tensor:
        return torch.log_softmax(logits * inv_temp, dim=-1).gather(1, targets[:, None])[:, 0]

"""A stand-in model and the ranks that train it: `python tests/trainer_ranks.py FOLDER JOB...` (see `main`). Used by test_trainer.py.

The model is token-local, with each kind of parameter the trainer must tell apart: vocabulary-split and tied, column- and row-parallel,
replicated, and replicated with one gradient per head. Case R adds exact gradients, case P lets autograd and the library add floats.
Shape legend: M tokens, D hidden, H heads, F intermediate.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels import collectives, reduce
from pipeline.config import Numerics, Optimizer
from pipeline.digest import sha256_file, tensors_digest
from pipeline.layout import MeshShape, ModelShape, micro_batches, owned_positions, owned_samples, shard
from stages.mesh import Mesh
from stages.parallel import Parallel

SHAPE = ModelShape(num_layers=1, hidden=12, intermediate=24, num_heads=6, num_kv_heads=6, head_dim=2, vocab=20)
NUMERICS = Numerics(k_leaf=4, vocab_leaf=4, token_leaf=4)
OPTIMIZER = Optimizer(lr=1e-2, weight_decay=0.1, max_grad_norm=0.05, schedule="cosine", warmup_steps=1)
LENGTHS = (5, 9, 3, 12, 7)  # samples, uneven over every dp
LAYER = "model.layers.0."
WHOLE = {
    "model.embed_tokens.weight": (20, 12),
    LAYER + "input_layernorm.weight": (12,),
    LAYER + "self_attn.q_proj.weight": (12, 12),
    LAYER + "self_attn.q_norm.weight": (2,),
    LAYER + "self_attn.o_proj.weight": (12, 12),
    LAYER + "mlp.up_proj.weight": (24, 12),
    LAYER + "mlp.down_proj.weight": (12, 24),
}


def chain(x: Tensor, w: Tensor) -> Tensor:
    """[M,K] by [N,K] -> [M,N]: one chain over k of rounded products, so that no bit depends on M or N."""
    y = torch.zeros(len(x), len(w))
    for k in range(x.shape[1]):
        y = y + x[:, k : k + 1] * w[:, k]
    return y


def partials(par: Parallel, axis, compute) -> tuple:
    """One partial per tree node of this rank; compute(leaf slice) -> tensor."""
    first = axis.ranges[par.mesh.t][0]
    own = axis.nodes[par.mesh.t]

    def leaf(i: int) -> Tensor:
        return compute(slice((i - first) * axis.leaf, (i - first + 1) * axis.leaf))

    return axis.nodes, torch.stack([reduce.halving(lo, hi, leaf) for lo, hi in own]), axis.count


def accumulate(par: Parallel, w: Tensor, leaves: Tensor) -> None:
    """Adds per-token gradients [M,*w.shape] to the parameter's accumulator."""
    with par.grads.naming(w.tensor_name):
        par.grads.buffer(w.tensor_name).add_(reduce.to_fixed(leaves, NUMERICS.grad_scale_log2).sum(0))


class Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, par, axis, x, w):
        ctx.par, ctx.axis = par, axis
        ctx.save_for_backward(x, w)
        return chain(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        accumulate(ctx.par, w, dy[:, :, None] * x[:, None, :])
        part = partials(ctx.par, ctx.axis, lambda s: chain(dy[:, s], w[s].t()))
        return None, None, collectives.tree_all_reduce([part], ctx.par.mesh.tp_group)[0], ctx.par.grads.placeholder(w)


class Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, par, axis, x, w):
        ctx.par = par
        ctx.save_for_backward(x, w)
        return collectives.tree_all_reduce([partials(par, axis, lambda s: chain(x[:, s], w[:, s]))], par.mesh.tp_group)[0]

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        accumulate(ctx.par, w, dy[:, :, None] * x[:, None, :])
        return None, None, chain(dy, w.t()), ctx.par.grads.placeholder(w)


class Scale(torch.autograd.Function):
    """x [M,G,D] * w [D]: a leaf per token and head."""

    @staticmethod
    def forward(ctx, par, x, w):
        ctx.par = par
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        accumulate(ctx.par, w, (dy * x).reshape(-1, len(w)))
        return None, dy * w, ctx.par.grads.placeholder(w)


class Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, par, ids, w):
        ctx.par, ctx.ids = par, ids - par.first_token_id
        ctx.own = (ctx.ids >= 0) & (ctx.ids < len(w))
        ctx.save_for_backward(w)
        y = torch.zeros(len(ids), w.shape[1])
        y[ctx.own] = w[ctx.ids[ctx.own]]
        return collectives.sum_disjoint(y, par.mesh.tp_group)

    @staticmethod
    def backward(ctx, dy):
        (w,) = ctx.saved_tensors
        with ctx.par.grads.naming(w.tensor_name):
            fixed = reduce.to_fixed(dy[ctx.own], NUMERICS.grad_scale_log2)
            ctx.par.grads.buffer(w.tensor_name).index_add_(0, ctx.ids[ctx.own], fixed)
        return None, None, ctx.par.grads.placeholder(w)


class Weight(nn.Module):
    def __init__(self, whole: Tensor, span):
        super().__init__()
        part = whole if span is None else whole.narrow(span[0], span[1], span[2] - span[1])
        self.weight = nn.Parameter(part.clone())


class StandIn(nn.Module):
    """Parents read their children's weights, as the real model does: ZeRO 3 must gather those too."""

    def __init__(self, mesh: Mesh, case: str):
        super().__init__()
        self.par, self.case = Parallel(mesh, SHAPE, NUMERICS), case
        g = torch.Generator().manual_seed(0)
        for name, shape in WHOLE.items():
            whole = torch.randn(shape, generator=g) * 0.4
            path = name.removesuffix(".weight").split(".")
            parent: nn.Module = self
            for part in path[:-1]:
                parent = parent._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            parent.add_module(path[-1], Weight(whole, shard(name, SHAPE, NUMERICS.k_leaf, NUMERICS.vocab_leaf, mesh.shape.tp, mesh.t)))
        for name, p in self.named_parameters():
            p.tensor_name = name

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """A score [M] of each token's target."""
        par, exact = self.par, self.case == "R"
        layer, table = self.model.layers._modules["0"], self.model.embed_tokens.weight
        attn, mlp = layer.self_attn, layer.mlp
        x = Embed.apply(par, ids, table)
        y = Scale.apply(par, x[:, None], layer.input_layernorm.weight)[:, 0] if exact else x * layer.input_layernorm.weight
        q = Column.apply(par, par.heads, y, attn.q_proj.weight) if exact else y @ attn.q_proj.weight.t()
        q = q.view(len(q), q.shape[1] // 2, 2)
        q = (Scale.apply(par, q, attn.q_norm.weight) if exact else q * attn.q_norm.weight).flatten(1)
        x = x + (Row.apply(par, par.heads, q, attn.o_proj.weight) if exact else q @ attn.o_proj.weight.t())
        up = torch.relu(Column.apply(par, par.ffn, x, mlp.up_proj.weight) if exact else x @ mlp.up_proj.weight.t())
        x = x + (Row.apply(par, par.ffn, up, mlp.down_proj.weight) if exact else up @ mlp.down_proj.weight.t())
        products = x * Embed.apply(par, targets, table)
        score = products[:, 0]
        for k in range(1, products.shape[1]):
            score = score + products[:, k]
        return score


def batches(step: int, mesh: Mesh, micro_batch: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(ids, targets, coefficients) of each of the rank's micro-batches; some may be empty."""
    g = torch.Generator().manual_seed(100 + step)
    samples = [
        (torch.randint(0, 20, (n,), generator=g), torch.randint(0, 20, (n,), generator=g), torch.randn(n, generator=g)) for n in LENGTHS
    ]
    shape = mesh.shape
    result = []
    for indices in micro_batches(owned_samples(len(samples), shape.dp, mesh.d), micro_batch, len(samples), shape.dp):
        rows = [slice(0, 0)] if not indices else []
        parts = [[x[s] for x in samples[0]] for s in rows]
        for i in indices:
            parts += [[x[a:b] for x in samples[i]] for a, b in owned_positions(LENGTHS[i], NUMERICS.token_leaf, shape.cp, mesh.c)]
        parts = parts or [[x[:0] for x in samples[0]]]
        result.append(tuple(torch.cat(column) for column in zip(*parts, strict=True)))
    return result


def train(mesh: Mesh, zero: int, case: str, steps: range, micro_batch: int, state: Path | None, weights: Path | None, out: Path) -> dict:
    """Trains from `weights` and `state` (None: from the seed) and leaves weights/ and state/ in `out`."""
    from stages import zero_hooks
    from stages.trainer import Trainer
    from stages.weights import load_slices, read_weights

    zero_hooks.PERSISTENT_NUMEL = 0  # else this model would be small enough for ZeRO 3 to partition nothing
    model = StandIn(mesh, case)
    if weights is not None:
        load_slices(model, read_weights(weights))
    trainer = Trainer(model, OPTIMIZER, mesh, zero, NUMERICS, total_steps=4)
    trainer.load_state(state)
    results = []
    for step in steps:
        todo = batches(step, mesh, micro_batch)
        with torch.no_grad():  # old logprobs come first in a real step
            for ids, targets, _ in todo:
                trainer.forward(ids, targets)
        with trainer.accumulate():
            for ids, targets, coefficients in todo:
                trainer.backward((coefficients * trainer.forward(ids, targets)).sum())
        results.append(trainer.update(len(LENGTHS)))
    for folder in ("weights", "state"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    hashes = {"weights": trainer.save_weights(out / "weights"), **trainer.save_state(out / "state")}
    signed = negative_zero_survives(trainer)
    trainer.close()
    if mesh.rank:
        return {}
    files = [out / "weights" / "model.safetensors", out / "state" / "exp_avg.safetensors", out / "state" / "exp_avg_sq.safetensors"]
    return {
        **{key: tensors_digest(value) for key, value in hashes.items()},
        "negative_zero": signed,
        "files": [sha256_file(f) for f in files],
        "gradients": [r.gradients for r in results],
        "norms": [r.grad_norm.hex() for r in results],
        "metrics": [r.metrics() for r in results],
    }


def negative_zero_survives(trainer) -> bool:
    """Writes -0.0 into a moment that ZeRO cuts, and reads it back."""
    name = LAYER + "self_attn.q_proj.weight"
    p, shape = trainer.parameters[name], trainer.shapes[name]
    trainer.zero.set_state(p, "exp_avg", -torch.zeros(shape))
    whole = trainer.zero.gather(p, shape, "exp_avg")
    return whole is None or bool(torch.signbit(whole).all())


def rank_main(rank: int, job: dict, folder: Path) -> None:
    shape = MeshShape(*job["layout"])
    if shape.world_size > 1:
        store = dist.FileStore(str(folder / f"{job['name']}.store"), shape.world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=shape.world_size)
    mesh = Mesh(shape, rank)
    for zero in job["zero"]:
        name = f"{job['name']}z{zero}"
        state, weights = (folder / job["from"] / part if "from" in job else None for part in ("state", "weights"))
        steps, size = range(*job.get("steps", (0, 3))), job.get("micro_batch", 2)
        result = train(mesh, zero, job.get("case", "R"), steps, size, state, weights, folder / name)
        if rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(result))


def main(folder: Path, jobs: list[dict]) -> int:
    """Runs jobs one after another: {"name", "layout": [tp, cp, dp], "zero": [stages], "case", "steps", "from", "micro_batch"}.

    DeepSpeed is imported once; each job forks its ranks, before any thread pool exists. Returns the worst exit status.
    """
    for name in ("deepspeed.ops", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3", "torch._dynamo"):
        importlib.import_module(name)

    worst = 0
    for job in jobs:
        children = []
        for rank in range(MeshShape(*job["layout"]).world_size):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    rank_main(rank, job, folder)
                    status = 0
                except BaseException:
                    import traceback

                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            children.append(pid)
        while children:
            pid, status = os.wait()
            children.remove(pid)
            if status:
                worst = status
                for other in children:
                    os.kill(other, 9)
    return worst


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(1 if main(Path(sys.argv[1]), [json.loads(text) for text in sys.argv[2:]]) else 0)

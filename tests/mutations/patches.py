"""Source mutations, first part: sums in another order, and kernels that are PyTorch's instead of ours."""

from __future__ import annotations

from dataclasses import dataclass

from tests.mutations.mutation import place
from tests.mutations.verdicts import Expected

TP3, DP2, CP2 = "tp3-s2", "dp2z1-m2-s2", "cp2"
LM_HEAD, DOWN_PROJ = "lm_head.weight", "model.layers.0.mlp.down_proj.weight"


@dataclass(frozen=True)
class Patch:
    """One fault of the code: in `file`, `old` becomes `new`. `layout` runs it against an unbroken oracle."""

    name: str
    kind: str
    file: str
    old: str
    new: str
    layout: str
    expected: Expected


def at(iteration: int, quantity: str, tensor: str | None = None, step: int | None = None, reason: str = "") -> Expected:
    fields = {"tensor": tensor, "step": step}
    return Expected(place(iteration, quantity, **{key: value for key, value in fields.items() if value is not None}), reason)


FIRST_LOGPROB = at(1, "rollout_logprob", "logprobs")
FIRST_REFERENCE = at(1, "reference_logprob", "logprobs")
OPS = "stages/lockstep_ops.py"

SUMS = [
    Patch(
        "partial sums of the ranks added left to right", "a sum reordered", "kernels/collectives.py",
        "        results.append(reduce.combine(parts, p.num_leaves, p.merge))\n",
        "        import functools\n\n        results.append(functools.reduce(p.merge, [parts[node] for node in sorted(parts)]))\n",
        TP3, FIRST_LOGPROB,
    ),
    Patch(
        "leaves of a matrix product added left to right (C++)", "a sum reordered", "kernels/cpu/linear.cpp",
        "    int64_t mid = (lo + hi) / 2;\n", "    int64_t mid = hi - 1;\n", CP2, FIRST_LOGPROB,
    ),
    Patch(
        "attention of the rollout in leaves of half the size", "a sum reordered", OPS,
        "self.par.numerics.kv_leaf, max_len=max_len)[0]", "self.par.numerics.kv_leaf // 2, max_len=max_len)[0]", DP2, FIRST_LOGPROB,
    ),
    Patch(
        "input gradients of q, k and v added in another order", "a sum reordered", OPS,
        "        for r in rest:  # a fixed", "        for r in reversed(rest):  # a fixed",
        CP2, at(1, "gradients", "model.embed_tokens.weight", 0),
    ),
    Patch(
        "token leaves of a micro-batch added in one chain", "a sum reordered", "kernels/linear.py",
        "    tiles = boundaries(tiles, m)\n    operands = acc", "    tiles = torch.tensor([0, m])\n    operands = acc",
        CP2, at(1, "gradients", DOWN_PROJ, 0),
    ),
    Patch(
        "gradients added over ranks in fp32", "a sum reordered", "stages/exact_gradients.py",
        "        collectives.exact_all_reduce([self.buffer(name) for name in chosen], group, names=chosen)\n",
        """        for name in chosen if group else ():
            total = reduce.from_fixed(self.buffer(name), self.scale_log2)
            torch.distributed.all_reduce(total, group=group)
            self.buffer(name).copy_(reduce.to_fixed(total, self.scale_log2))
""",
        DP2, at(1, "gradients", LM_HEAD, 0),
    ),
    Patch(
        "sums of the metrics by torch.sum in fp32", "a sum reordered", "stages/objectives.py",
        "        inner = [math.fsum(values[a:b]) / ", "        inner = [float(x[a:b].sum()) / ",
        CP2, at(1, "metrics", "train/loss", 0),
    ),
]  # fmt: skip

KERNELS = [
    Patch(
        "linear: torch.nn.functional.linear", "a kernel is PyTorch's", "kernels/linear.py",
        "    build.library().linear_forward(*operands, shape[0], w_shape[0], shape[1], leaf, half, half_out)\n",
        "    y.copy_(torch.nn.functional.linear(x, w))\n", DP2, FIRST_LOGPROB,
    ),
    Patch(
        "attention of the rollout: scaled_dot_product_attention", "a kernel is PyTorch's", OPS,
        "        return attention.forward(q, k, v, seqs, positions, scale, self.par.numerics.kv_leaf, max_len=max_len)[0]\n",
        "        from stages.torch_ops import TorchOps\n\n"
        "        return TorchOps(self.par).cached_attention(q, k, v, seqs, positions, scale, max_len)\n",
        DP2, FIRST_LOGPROB,
    ),
    Patch(
        "attention in training: scaled_dot_product_attention", "a kernel is PyTorch's", OPS,
        "        return _apply(_Attention, self.par, batch, scale, q, k, v)\n",
        "        from stages.torch_ops import TorchOps\n\n        return TorchOps(self.par).attention(q, k, v, batch, scale)\n",
        DP2, FIRST_REFERENCE,
    ),
    Patch(
        "logprobs of the rollout: log_softmax", "a kernel is PyTorch's", OPS,
        "        return logprob.finish(stats[0], target)[0]\n",
        "        return torch.log_softmax(logits * inv_temp, -1).gather(1, targets[:, None])[:, 0]\n", DP2, FIRST_LOGPROB,
    ),
    Patch(
        "logprobs in training: log_softmax", "a kernel is PyTorch's", OPS,
        "        return _apply(_Logprob, self.par, batch, inv_temp, h, w)\n",
        "        from stages.torch_ops import TorchOps\n\n        return TorchOps(self.par).logprob(h, w, batch, inv_temp)\n",
        DP2, FIRST_REFERENCE,
    ),
    Patch(
        "RMSNorm: torch.nn.functional.rms_norm", "a kernel is PyTorch's", "kernels/rms_norm.py",
        "    build.library().rms_norm_forward(x.dtype is torch.bfloat16, *arguments)\n",
        "    build.library().rms_norm_forward(x.dtype is torch.bfloat16, *arguments)\n"
        "    y.copy_(torch.nn.functional.rms_norm(x, w.shape, w, eps))\n",
        DP2, FIRST_LOGPROB,
    ),
    Patch(
        "SwiGLU: gate * torch.sigmoid(gate) * up", "a kernel is PyTorch's", OPS,
        "        return _apply(_SwiGLU, gate, up)\n", "        return gate * torch.sigmoid(gate) * up\n", DP2, FIRST_LOGPROB,
    ),
    Patch(
        "SwiGLU's gradient: autograd of torch.nn.functional.silu", "a kernel is PyTorch's", OPS,
        "        return swiglu.backward(dy.contiguous(), *ctx.saved_tensors)\n",
        """        gate, up = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            return torch.autograd.grad(torch.nn.functional.silu(gate) * up, (gate, up), dy)\n""",
        DP2, at(1, "gradients", "model.embed_tokens.weight", 0),
    ),
    Patch(
        "AdamW: torch.optim", "a kernel is PyTorch's", "stages/optimizer.py",
        "                adamw.step(p.data, p.grad, m, v, ",
        """                torch.optim._functional.adamw(
                    [p.data], [p.grad], [m], [v], [], [torch.tensor(state["step"] - 1.0)], foreach=False, amsgrad=False, beta1=beta1,
                    beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
                )
                continue
                adamw.step(p.data, p.grad, m, v, """,
        DP2, at(1, "exp_avg_sq", LM_HEAD),
    ),
    Patch(
        "feed-forward by PyTorch, and the readback says so", "a kernel is PyTorch's", "stages/model.py",
        "    return {module: expected_implementation(kernels.of(module), side) for module in MODULES}\n",
        """    return {module: expected_implementation(kernels.of(module), side) for module in MODULES} | {"ffn": "torch"}\n""",
        DP2, at(1, "rollout_logprob", "logprobs", reason="ffn ran torch, case R/R asks for lockstep"),
    ),
]  # fmt: skip

"""The trainer of one rank: micro-batches in, one exact gradient sum, one optimizer step of the DeepSpeed engine, evidence out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernels import collectives, reduce
from pipeline.digest import sha256_tensor, write_json
from stages import weights
from stages.exact_gradients import ExactGradients
from stages.mesh import Mesh
from stages.optimizer import MOMENTS, AdamW, learning_rate, parameter_groups
from stages.zero_hooks import ZeroEngine

if TYPE_CHECKING:
    from pipeline.config import Numerics, Optimizer


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step leaves behind, besides the new weights."""

    step: int  # optimizer steps done, this one included
    gradients: dict[str, str]  # sha256 of each whole fp32 gradient before clipping; on rank 0, {} elsewhere
    grad_norm: float  # fp64, of the whole model, before clipping
    lr: dict[str, float]  # by parameter group

    def metrics(self) -> dict[str, float]:
        """The train/* metrics of the step itself."""
        norm = float(torch.tensor(self.grad_norm, dtype=torch.float32))
        return {"train/grad_norm": norm, "train/step": float(self.step - 1), **{f"train/lr-{group}": lr for group, lr in self.lr.items()}}


class Trainer:
    """`model` has `par` (stages.parallel.Parallel) and holds the rank's fp32 slices; its autograd functions write into `par.grads`.

    Every method is collective over the world. All ranks run the same number of forwards and backwards: an empty micro-batch has no rows.
    """

    def __init__(self, model: nn.Module, cfg: Optimizer, mesh: Mesh, zero_stage: int, numerics: Numerics, total_steps: int = 0):
        self.model, self.cfg, self.mesh, self.total_steps = model, cfg, mesh, total_steps
        self.parameters = dict(model.named_parameters())
        self.shapes = {name: p.shape for name, p in self.parameters.items()}  # of the slices; ZeRO 3 empties the parameters themselves
        self.slices = weights.Slices(model.par)  # type: ignore[arg-type]
        self.grads = ExactGradients(self.shapes, numerics.grad_scale_log2)
        model.par.grads = self.grads  # type: ignore[union-attr]
        self.optimizer = AdamW(parameter_groups(self.parameters.items(), cfg.weight_decay), cfg.lr, (cfg.betas[0], cfg.betas[1]), cfg.eps)
        self.groups = [g["name"] for g in self.optimizer.param_groups]
        self.zero = ZeroEngine(model, self.optimizer, mesh, zero_stage, cfg.max_grad_norm)
        self.step = self.forwards = self.backwards = 0
        self._floats: dict[str, Tensor] = {}
        self._open = contextlib.ExitStack()

    # --- one optimizer step -----------------------------------------------------------------------------------------------------
    def forward(self, *args: Any) -> Any:
        self.forwards += 1
        return self.zero.engine(*args)

    def backward(self, loss: Tensor) -> None:
        """Of one micro-batch's unnormalised loss (a sum over its tokens), inside `accumulate()`."""
        self.backwards += 1
        self.zero.engine.backward(loss, scale_wrt_gas=False)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """The micro-batches of one step. `update` comes last inside the block, or after it."""
        self.grads.zero()
        self._floats.clear()
        with self._open:
            self._open.enter_context(self.zero.accumulation(self.parameters, self._floats))
            yield

    def update(self, divisor: float) -> UpdateResult:
        """Sums the gradients over context- and data-parallel ranks, divides by `divisor`, clips and steps.

        OverflowError, with the parameter's name, when a sum leaves 62 bits or a gradient is not finite.
        """
        self._open.close()
        gradients = self._whole_gradients(divisor)
        norm = self._norm(gradients)
        hashes = self._hashes(gradients)
        lr = learning_rate(self.cfg, self.step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for name, p in self.parameters.items():
            self.zero.set_gradient(p, gradients.pop(name))
        self.zero.step(norm)
        self.step += 1
        return UpdateResult(self.step, hashes, norm, dict.fromkeys(self.groups, lr))

    def _whole_gradients(self, divisor: float) -> dict[str, Tensor]:
        """fp32 gradients of the rank's slices, equal on every rank of the gradient group."""
        exact, floats = self._agree()
        self.grads.all_reduce(self.mesh.grad_group, exact)
        self.grads.all_reduce(self.mesh.tp_group, [name for name in exact if is_head_norm(name)])
        gradients = {name: self.grads.finish(name, divisor) for name in exact}
        for name in floats:  # case P: floats are added by the communication library, as an ordinary trainer does
            g = self._floats.pop(name, None)
            g = torch.zeros(self.shapes[name]) if g is None else g.contiguous()
            for group in (self.mesh.grad_group, self.mesh.tp_group if is_head_norm(name) else None):
                if group is not None:
                    dist.all_reduce(g, group=group)
            g.div_(divisor)
            gradients[name] = gradients[name] + g if name in gradients else g
        return {name: gradients[name] if name in gradients else torch.zeros(self.shapes[name]) for name in self.parameters}

    def _agree(self) -> tuple[list[str], list[str]]:
        """Names with exact and with float gradients on any rank (a tied weight may have both), so that all ranks make the same calls."""
        names = list(self.parameters)
        flags = torch.tensor([[self.grads.touched(n) for n in names], [n in self._floats for n in names]], dtype=torch.int32)
        collectives.max_all_reduce(flags, dist.group.WORLD)
        return tuple([n for n, flag in zip(names, row, strict=True) if flag] for row in flags.tolist())  # type: ignore[return-value]

    def _norm(self, gradients: dict[str, Tensor]) -> float:
        """L2 norm of the whole model's gradient: replicated tensors count once, slices are added over the tensor-parallel ranks."""
        exponent = torch.tensor([reduce.max_exponent(list(gradients.values()))])
        top = int(collectives.max_all_reduce(exponent, self.mesh.tp_group))
        sliced = {name for name in gradients if self.slices.span(name) is not None}
        limbs = reduce.square_limbs([g for name, g in gradients.items() if name in sliced], top)
        collectives.exact_all_reduce(limbs, self.mesh.tp_group, names=["the squared gradient norm"])
        limbs += reduce.square_limbs([g for name, g in gradients.items() if name not in sliced], top)
        return reduce.norm_from_limbs(limbs, top)

    def _hashes(self, gradients: dict[str, Tensor]) -> dict[str, str]:
        if self.mesh.c or self.mesh.d:
            return {}
        wholes = ((name, self.slices.gather(name, g)) for name, g in gradients.items())
        return {name: sha256_tensor(whole) for name, whole in wholes if whole is not None}

    # --- weights and state ------------------------------------------------------------------------------------------------------
    def whole_tensors(self, key: str | None = None) -> Iterator[tuple[str, Tensor | None]]:
        """(name, whole fp32 master weight or moment on rank 0, None elsewhere), in name order, one in memory at a time."""
        for name in sorted(self.parameters):
            local = self.zero.gather(self.parameters[name], self.shapes[name], key)
            yield name, None if local is None else self.slices.gather(name, local)

    def _write(self, path: Path, key: str | None) -> dict[str, str]:
        shapes = {name: self.slices.whole_shape(name, self.shapes[name]) for name in sorted(self.shapes)}
        return weights.write_tensors(path, shapes, self.whole_tensors(key), self.mesh.rank == 0)

    def save_weights(self, folder: Path, source: Path | None = None) -> dict[str, str]:
        """model.safetensors and tensors.json, and config.json of the folder `source`. Returns {name: sha256} on rank 0, {} elsewhere."""
        hashes = self._write(folder / "model.safetensors", None)
        if self.mesh.rank == 0:
            weights.write_hashes(folder, hashes)
            if source is not None:
                weights.copy_model_files(source, folder)
        return hashes

    def save_state(self, folder: Path) -> dict[str, dict[str, str]]:
        """exp_avg.safetensors, exp_avg_sq.safetensors, step.json, tensors.json. Returns {moment: {name: sha256}}; empty but on rank 0."""
        hashes = {key: self._write(folder / f"{key}.safetensors", key) for key in MOMENTS}
        if self.mesh.rank == 0:
            write_json(folder / "step.json", {"step": self.step})
            weights.write_hashes(folder, {f"{key}/{name}": sha for key in MOMENTS for name, sha in hashes[key].items()})
        return hashes

    def load_state(self, folder: Path | None) -> None:
        """Moments and step count of any layout and ZeRO stage; None: a fresh start. UserError when a tensor's bytes were changed."""
        if folder is None:
            return
        from safetensors import safe_open

        expected = weights.recorded_hashes(folder)
        for key in MOMENTS:
            path = folder / f"{key}.safetensors"
            with safe_open(path, framework="pt") as file:
                for name, p in self.parameters.items():
                    whole = file.get_tensor(name)
                    weights.check_tensor(path, name, whole, expected.get(f"{key}/{name}"))
                    self.zero.set_state(p, key, self.slices.take(name, whole))
        self.step = json.loads((folder / "step.json").read_text())["step"]
        self.zero.set_step(self.step)

    def close(self) -> None:
        """Hands the engine's memory and hooks back."""
        self.zero.close()


def is_head_norm(name: str) -> bool:
    """q_norm and k_norm are whole on every tensor-parallel rank, but each rank sees only its own heads' gradients."""
    return name.endswith(("q_norm.weight", "k_norm.weight"))

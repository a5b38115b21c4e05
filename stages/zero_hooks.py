"""The one file that knows DeepSpeed's insides: how exact gradients enter its engine, and how partitioned state comes out.

DeepSpeed partitions parameters, moments and gradients, gathers parameters, clips and steps. What it must not do is add floats: the
order of its sums moves with the ZeRO stage, the number of ranks and the bucket size. Hooks on 0.19.8, each checked by `check`:

1. `coalesce_grad_reduction` (ZeRO 1-3) and `no_sync` (ZeRO 0), both public: backward passes inside leave the reduction alone. On
   leaving, there is no `param.grad`, so nothing is reduced, but the gradient partitions exist. They are filled through the public
   setters: `safe_set_full_grad` (1, 2) and `safe_set_local_grad`, zero padded (3: the full setter raises on the last rank when a size
   doesn't divide).
2. The norm: `scaled_global_norm` (1, 2), `_get_norm_groups` and `unscale_and_clip_grads` (3), `clip_fp32_gradients` (0) get ours. Stock
   norms depend on where partitions cut. The elementwise clip stays DeepSpeed's, and ZeRO 0 repeats its formula.
3. `__compatible_ops__["deepspeed_shm_comm"] = False`: else `init_distributed` compiles a shared-memory all-reduce for minutes; it adds
   floats anyway.
4. Masters and moments are read and written in the flat fp32 partitions (`single_partition_of_fp32_groups`,
   `fp32_partitioned_groups_flat`) and moved as integers: DeepSpeed's own getters add zeros, which turns -0.0 into +0.0.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stages.mesh import Mesh
from stages.optimizer import AdamW

DEEPSPEED_VERSION = "0.19.8"
PERSISTENT_NUMEL = 2048  # ZeRO 3 keeps smaller parameters (norms) on every rank and partitions the rest


def check() -> None:
    """Raises RuntimeError, naming the version, when a hooked name is missing."""
    installed = version("deepspeed")
    wanted = f"deepspeed=={DEEPSPEED_VERSION} is needed (the trainer hooks its internals)"
    if installed != DEEPSPEED_VERSION:
        raise RuntimeError(f"{wanted}, but {installed} is installed: pip install deepspeed=={DEEPSPEED_VERSION}")
    import deepspeed.ops
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    hooked = {
        DeepSpeedEngine: ("coalesce_grad_reduction", "no_sync", "clip_fp32_gradients"),
        DeepSpeedZeroOptimizer: ("scaled_global_norm",),
        DeepSpeedZeroOptimizer_Stage3: ("_get_norm_groups", "unscale_and_clip_grads", "get_local_fp32_param", "set_local_hp_param"),
        deepspeed.ops: ("__compatible_ops__",),
        deepspeed.utils: (
            "safe_set_full_grad",
            "safe_set_local_grad",
            "safe_get_local_fp32_param",
            "safe_get_local_optimizer_state",
            "safe_set_local_optimizer_state",
        ),
    }
    missing = [f"{owner.__name__}.{name}" for owner, names in hooked.items() for name in names if not hasattr(owner, name)]
    if missing:
        raise RuntimeError(f"{wanted}: {', '.join(missing)} not found")


def engine_config(stage: int, max_grad_norm: float) -> dict[str, Any]:
    """DeepSpeed's JSON. fp32 everywhere; buckets are never used, as the engine reduces nothing."""
    zero = {
        "stage": stage,
        "overlap_comm": False,  # a history of races
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 1,
        "stage3_param_persistence_threshold": PERSISTENT_NUMEL,
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    return config if stage == 3 else config | {"gradient_allreduce_op": "sum"}


def start(mesh: Mesh) -> None:
    """Gives DeepSpeed its communication object, and a process group of one rank where there is none."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(mesh.rank))  # required, though nothing on a CPU reads it
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)  # it warns of an untested optimizer, on every rank
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor", category=FutureWarning)  # called by DeepSpeed
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False, dist_init_required=False)


class ZeroEngine:
    """A DeepSpeed engine that takes finished gradients. Every method is collective over the gradient group unless it says otherwise."""

    def __init__(self, model: nn.Module, optimizer: AdamW, mesh: Mesh, stage: int, max_grad_norm: float):
        check()
        start(mesh)
        import deepspeed

        self.mesh, self.stage, self.max_grad_norm, self.base = mesh, stage, max_grad_norm, optimizer
        config = engine_config(stage, max_grad_norm)
        parts: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mesh, dist_init_required=False)
        self.engine, self.zero = parts[:2]  # `zero` wraps `optimizer`; at stage 0 it is `optimizer` itself
        self._norm = torch.zeros(())
        self._install_norm()
        for flat in self._flats():
            optimizer.init_state(flat)

    def _install_norm(self) -> None:
        zero = self.zero
        match self.stage:
            case 0:
                self.engine.clip_fp32_gradients = self._clip
            case 1 | 2:
                zero.scaled_global_norm = lambda norm_type=2: self._norm
            case 3:
                stock = zero.unscale_and_clip_grads
                zero._get_norm_groups = lambda: [self._norm]
                # combine_grad_norm_groups squares and takes a root again: hand over the norm itself
                zero.unscale_and_clip_grads = lambda sub_group_id, total_norm: stock(sub_group_id, self._norm)

    def _clip(self) -> None:
        factor = torch.clamp((self._norm + 1e-6) / self.max_grad_norm, min=1.0)
        for p in self.engine.module.parameters():
            if p.grad is not None:
                p.grad.mul_(1.0 / factor)

    # --- gradients ------------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def accumulation(self, parameters: Mapping[str, Tensor], floats: dict[str, Tensor]) -> Iterator[None]:
        """Backward passes inside reduce nothing; gradients that autograd left on parameters move to `floats`. Not collective."""
        context = self.engine.coalesce_grad_reduction if self.stage else self.engine.no_sync
        with context():
            try:
                yield
            finally:
                for name, p in parameters.items():
                    if p.grad is not None:
                        floats[name] = p.grad
                        p.grad = None

    def set_gradient(self, param: nn.Parameter, gradient: Tensor) -> None:
        """The finished fp32 gradient of the rank's tensor-parallel slice; the engine keeps its partition of it. Not collective."""
        from deepspeed.utils import safe_set_full_grad, safe_set_local_grad

        match self.stage:
            case 0:
                param.grad = gradient
            case 1 | 2:
                safe_set_full_grad(param, gradient)
            case 3:
                safe_set_local_grad(param, self._partition(param, gradient))

    def step(self, norm: float) -> None:
        """Clip by `norm`, then one optimizer step."""
        self._norm = torch.tensor(norm, dtype=torch.float32)
        self.engine.step()

    # --- state: key None is the fp32 master weight, else a key of the optimizer's state ---------------------------------------
    def _flats(self) -> Iterable[Tensor]:
        """The tensors that the optimizer really steps."""
        match self.stage:
            case 0:
                return list(self.engine.module.parameters())
            case 1 | 2:
                return self.zero.single_partition_of_fp32_groups
            case _:
                return self.zero.fp32_partitioned_groups_flat

    def _partition(self, param: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's ZeRO-3 partition of a tensor, zero padded at the end."""
        size = param.partition_numel()  # type: ignore[attr-defined]
        own = whole.reshape(-1)[size * self.mesh.get_data_parallel_rank() :][:size]
        return torch.nn.functional.pad(own, (0, size - own.numel()))

    def _fragment(self, param: nn.Parameter, key: str | None) -> Tensor:
        """View of this rank's piece of a parameter's flat master or moment (ZeRO 1, 2)."""
        mapping = param._hp_mapping  # type: ignore[attr-defined]
        flat = self.zero.single_partition_of_fp32_groups[mapping.param_group_index]
        address = mapping.get_hp_fragment_address()
        return (flat.data if key is None else self.base.state[flat][key]).narrow(0, address.start, address.numel)

    def gather(self, param: nn.Parameter, shape: torch.Size, key: str | None = None) -> Tensor | None:
        """The rank's tensor-parallel slice, whole, of one parameter's state: on the first rank of the gradient group, None on others."""
        first = self.mesh.grad_ranks[0]
        if self.stage == 0:
            value = param.data if key is None else self.base.state[param][key]
        elif self.stage == 3:
            value = self._gather_partitions(param, key, first)
        else:
            value = torch.zeros(shape.numel())
            if param._hp_mapping is not None:  # type: ignore[attr-defined]
                address = param._hp_mapping.lp_fragment_address  # type: ignore[attr-defined]
                value.narrow(0, address.start, address.numel).copy_(self._fragment(param, key))
            if self.mesh.grad_group is not None:
                dist.reduce(value.view(torch.int32), first, group=self.mesh.grad_group)  # bit patterns, disjoint
        return None if value is None or self.mesh.rank != first else value.reshape(shape)

    def _gather_partitions(self, param: nn.Parameter, key: str | None, first: int) -> Tensor | None:
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        part = (safe_get_local_fp32_param(param) if key is None else safe_get_local_optimizer_state(param, key)).detach().contiguous()
        parts = [part]
        if self.mesh.grad_group is not None:
            parts = [torch.empty_like(part) for _ in self.mesh.grad_ranks] if self.mesh.rank == first else []
            dist.gather(part, parts or None, first, group=self.mesh.grad_group)
        return torch.cat(parts)[: param.ds_numel] if parts else None  # type: ignore[attr-defined]

    def set_state(self, param: nn.Parameter, key: str, value: Tensor) -> None:
        """Writes this rank's part of a moment, from the rank's tensor-parallel slice. Not collective."""
        from deepspeed.utils import safe_set_local_optimizer_state

        match self.stage:
            case 0:
                self.base.state[param][key].copy_(value)
            case 1 | 2 if param._hp_mapping is not None:  # type: ignore[attr-defined]
                address = param._hp_mapping.lp_fragment_address  # type: ignore[attr-defined]
                self._fragment(param, key).copy_(value.reshape(-1).narrow(0, address.start, address.numel))
            case 3:
                safe_set_local_optimizer_state(param, self._partition(param, value), key)

    def set_step(self, step: int) -> None:
        """Optimizer steps done so far. Not collective."""
        for flat in self._flats():
            self.base.state[flat]["step"] = step

    def close(self) -> None:
        self.engine.destroy()

"""What every rank of a stage does first: kernels, mesh, model - and the exchange of per-token results."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.cpu import build
from pipeline.config import Config
from pipeline.digest import write_json
from pipeline.layout import MeshShape
from pipeline.records import Rollout
from stages.batch import Sample
from stages.mesh import Mesh
from stages.model import CausalLM, ModelConfig
from stages.parallel import Parallel


def start_mesh(shape: MeshShape, threads: int, kernel_build: str) -> Mesh:
    """Chooses the kernel build, joins the process group and makes the mesh's groups."""
    start_process(shape.world_size, threads, kernel_build)
    return mesh_of(shape, shape.world_size)


def mesh_of(shape: MeshShape, world_size: int) -> Mesh:
    """This process' place in a mesh over the first ranks of the world."""
    return Mesh(shape, int(os.environ.get("RANK", "0")), world_size - shape.world_size)


def start_process(world_size: int, threads: int, kernel_build: str) -> None:
    build.select(kernel_build)
    build.set_threads(threads)
    torch.set_num_threads(threads)
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")


def build_model(checkpoint: Path, mesh: Mesh, cfg: Config, implementations: dict[str, str], trained: bool = False) -> CausalLM:
    """The rank's slice of the model of a Hugging Face folder, weights not loaded yet: fp32 masters to train, else as they are stored."""
    config = ModelConfig.from_hf(json.loads((checkpoint / "config.json").read_text()))
    model = CausalLM(config, Parallel(mesh, config.shape, cfg.numerics), implementations)
    return model if trained else model.to(model.par.dtype)


def samples_of(rollout: Rollout) -> list[Sample]:
    offsets = rollout.response_offsets
    rows = zip(rollout.sample_tokens(), rollout.prompt_lengths.tolist(), offsets.tolist())
    return [Sample(i, torch.from_numpy(tokens).long(), length, offset) for i, (tokens, length, offset) in enumerate(rows)]


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, 0)
    return values[0]


class ResponseArrays:
    """Packed per-response-token fp32 arrays [A], filled by the ranks that own the tokens and completed by one exchange.

    The exchange adds bit patterns as integers, and every other rank holds zeros, so the bytes arrive unchanged.
    """

    def __init__(self, size: int, names: tuple[str, ...]):
        self.names = names
        self.values = torch.zeros(len(names), size)

    def put(self, slots: Tensor, **columns: Tensor) -> None:
        for name, column in columns.items():
            self.values[self.names.index(name), slots] = column.detach()

    def gather(self, mesh: Mesh) -> dict[str, Tensor]:
        if mesh.grad_group is not None:
            dist.all_reduce(self.values.view(torch.int32), group=mesh.grad_group)
        return dict(zip(self.names, self.values))


def gather_objects(mesh: Mesh, part: list) -> list:
    """The data-parallel ranks' lists, end to end, on every rank."""
    if mesh.dp_group is None:
        return part
    parts: list[Any] = [None] * mesh.shape.dp
    dist.all_gather_object(parts, part, group=mesh.dp_group)
    return [item for p in parts for item in p]


def peak_memory() -> int:
    """Most bytes this process has held in memory, the pages it shares with the fork server included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_readback(folder: Path, model: CausalLM, mesh: Mesh, side: str, counts: dict[str, int]) -> None:
    """What this process really ran: kernels and calls per module."""
    rank = mesh.rank
    readback: dict[str, Any] = {
        "rank": rank,
        "side": side,
        "world_size": mesh.shape.world_size,
        "mesh": list(mesh.shape.coordinates(rank)),
        "modules": {module: asdict(r) for module, r in model.readbacks.items()},
        "kernel_build": build.build_id(),
        "counts": counts,
        "versions": {"torch": torch.__version__},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"rank{rank:05d}.json", readback)

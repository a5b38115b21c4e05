"""Weights and optimizer state on disk: whole tensors under Hugging Face names, the same bytes from every layout and into every layout.

Export streams one tensor at a time to rank 0; a digest beside each file is checked when it is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.digest import sha256_tensor, tensors_digest, write_json
from pipeline.errors import UserError
from pipeline.layout import shard
from stages.parallel import Parallel

METADATA = {"format": "pt"}  # fixed, so that equal tensors are equal files


class Slices:
    """Which part of each whole tensor is this rank's, and how the parts come together again."""

    def __init__(self, par: Parallel):
        self.par, self.mesh = par, par.mesh

    def span(self, name: str, t: int | None = None) -> tuple[int, int, int] | None:
        """(dim, start, stop) of tensor-parallel rank t (default: this one); None when every rank holds the whole tensor."""
        n, mesh = self.par.numerics, self.mesh
        if mesh.shape.tp == 1:
            return None
        return shard(name, self.par.shape, n.k_leaf, n.vocab_leaf, mesh.shape.tp, mesh.t if t is None else t)

    def whole_shape(self, name: str, local: torch.Size) -> torch.Size:
        last = self.span(name, self.mesh.shape.tp - 1)
        return local if last is None else torch.Size(last[2] if i == last[0] else n for i, n in enumerate(local))

    def take(self, name: str, whole: Tensor) -> Tensor:
        """This rank's slice of a whole tensor (or of a safetensors slice of it)."""
        span = self.span(name)
        if span is None:
            return whole[:]
        dim, a, b = span
        return whole[a:b] if dim == 0 else whole[:, a:b]

    def gather(self, name: str, local: Tensor) -> Tensor | None:
        """The whole tensor on the first tensor-parallel rank, None on the others. Collective over the tensor-parallel group."""
        ranks, span = self.mesh.tp_ranks, self.span(name)
        if span is None:
            return local if self.mesh.t == 0 else None
        if self.mesh.t:
            dist.send(local.contiguous(), ranks[0])
            return None
        parts = [local]
        for t in range(1, len(ranks)):
            dim, a, b = self.span(name, t)  # type: ignore[misc]
            part = local.new_empty([b - a if i == dim else n for i, n in enumerate(local.shape)])
            dist.recv(part, ranks[t])
            parts.append(part)
        return torch.cat(parts, span[0])


@contextlib.contextmanager
def safetensors_writer(path: Path, shapes: Mapping[str, torch.Size]) -> Iterator[Callable[[str, Tensor], None]]:
    """A function that takes fp32 tensors one by one, in the order of `shapes`. The file appears under its name when all are written."""
    header: dict = {"__metadata__": METADATA}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * shape.numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    remaining = iter(shapes.items())
    temporary = path.with_name(f".{path.name}.tmp")

    def write(name: str, tensor: Tensor) -> None:
        if (name, tensor.shape) != next(remaining, None) or tensor.dtype != torch.float32:
            raise ValueError(f"{path}: tensor {name} {tensor.dtype} {tuple(tensor.shape)} out of order, or of another shape than announced")
        file.write(tensor.detach().cpu().contiguous().numpy().tobytes())

    try:
        with open(temporary, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            yield write
            if missing := next(remaining, None):
                raise ValueError(f"{path}: tensor {missing[0]} was never written")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_tensors(path: Path, shapes: Mapping[str, torch.Size], tensors: Iterable[tuple[str, Tensor | None]], root: bool) -> dict[str, str]:
    """Streams `tensors` (None on every rank but rank 0) to a file on rank 0; returns {name: sha256} there, {} elsewhere. Collective."""
    hashes: dict[str, str] = {}
    with safetensors_writer(path, shapes) if root else contextlib.nullcontext() as write:
        for name, tensor in tensors:
            if write is not None and tensor is not None:
                write(name, tensor)
                hashes[name] = sha256_tensor(tensor)
    return hashes


def write_hashes(folder: Path, hashes: Mapping[str, str]) -> None:
    """tensors.json: what the folder's tensors must hash to when they are read."""
    write_json(folder / "tensors.json", {"sha256": dict(hashes), "digest": tensors_digest(hashes)})


def copy_model_files(source: Path, folder: Path) -> None:
    """The small files that go with weights: config.json and generation_config.json, byte by byte."""
    for name in ("config.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def recorded_hashes(folder: Path) -> dict[str, str]:
    path = folder / "tensors.json"
    if not path.exists():
        raise UserError(f"{path}: missing, so the tensors beside it can't be checked; run the stage that writes this folder again")
    return json.loads(path.read_text())["sha256"]


def check_tensor(path: Path, name: str, tensor: Tensor, expected: str | None) -> None:
    """Raises UserError when the bytes that were read are not those that were written."""
    if expected is None or sha256_tensor(tensor) != expected:
        # DVC trusts a damaged object of its cache and would check it out again: that copy has to go too
        remedy = f"remove it with its cached copy (find -L .dvc/cache -samefile {path} -delete; rm -r {path.parent}) and run again"
        raise UserError(f"{path}: tensor {name} does not match the sha256 in tensors.json; {remedy}")


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole fp32 tensor) of a folder's model.safetensors, one by one, each checked against tensors.json."""
    from safetensors import safe_open

    expected = recorded_hashes(folder)
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            check_tensor(path, name, tensor, expected.get(name))
            yield name, tensor.to(torch.float32)


def load_slices(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], sliced: bool = False) -> None:
    """Copies whole tensors into the rank's slices of `model.par`. UserError for a tensor that is missing, unknown or of another shape.

    sliced: `tensors` are the rank's slices already.
    """
    slices = Slices(model.par)  # type: ignore[arg-type]
    parameters = dict(model.named_parameters())
    left = set(parameters)
    for name, whole in tensors:
        if name == "lm_head.weight" and name not in parameters:
            continue  # tied: the embedding is the head
        if name not in parameters:
            raise UserError(f"weights hold an unknown tensor {name}: config.json describes another model")
        parameter = parameters[name]
        if whole.shape != (parameter.shape if sliced else slices.whole_shape(name, parameter.shape)):
            raise UserError(f"tensor {name} has shape {tuple(whole.shape)}: config.json describes another model")
        parameter.data.copy_(whole if sliced else slices.take(name, whole))
        left.discard(name)
    if left:
        raise UserError(f"weights lack the tensor {min(left)} ({len(left)} missing): config.json describes another model")

"""Train: old logprobs, then the optimizer steps of one iteration on DeepSpeed; out come new weights, state and the evidence."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import entry

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.config import Config
    from stages.batch import Sample, TokenBatch
    from stages.mesh import Mesh
    from stages.model import CausalLM
    from stages.objectives import TokenData
    from stages.trainer import Trainer

OUTPUTS = ("folder", "weights", "state", "sidecars", "readbacks")


def main(job: entry.Job) -> None:
    s = job.step
    with job.outputs(s.train, s.weights_out, s.state_out, s.sidecars, s.readbacks / "train") as out:
        job.launch(job.mesh_shape.world_size, **{name: str(path) for name, path in zip(OUTPUTS, out, strict=True)})


def rank_main(args: dict[str, Any]) -> dict[str, Any]:
    from stages import ranks

    job = entry.Job.from_args(args)
    mesh = ranks.start_mesh(job.mesh_shape, job.cfg.launch.threads, job.cfg.launch.kernel_build)
    started = time.perf_counter()
    trainer = build_trainer(job, mesh)
    times = {"initialize_time": time.perf_counter() - started}
    times |= train(job, trainer, {name: Path(args[name]) for name in OUTPUTS})
    return {**times, "peak_memory": ranks.peak_memory()}


def build_trainer(job: entry.Job, mesh: Mesh, kind: type[Trainer] | None = None) -> Trainer:
    """With the weights and the state that the iteration starts from. kind: a subclass, to look at what the trainer does."""
    from stages import ranks
    from stages.model import implementations
    from stages.trainer import Trainer
    from stages.weights import load_slices, read_weights

    cfg, step = job.cfg, job.step
    model = ranks.build_model(step.weights_in, mesh, cfg, implementations(cfg.kernels, "training"), trained=True)
    load_slices(model, read_weights(step.weights_in))
    total_steps = cfg.iterations * cfg.objective.num_updates
    trainer = (kind or Trainer)(model, cfg.optimizer, mesh, cfg.layout.zero, cfg.numerics, total_steps)
    trainer.load_state(step.state_in)
    return trainer


def train(job: entry.Job, trainer: Trainer, out: dict[str, Path]) -> dict[str, float]:
    """The iteration's old logprobs and optimizer steps, and everything that they leave; seconds by part."""
    from pipeline.records import Rollout, load_arrays
    from stages import objectives, ranks

    cfg, step, mesh = job.cfg, job.step, trainer.mesh
    model: CausalLM = trainer.model  # type: ignore[assignment]
    clock = [time.perf_counter()]
    trainer.forwards = trainer.backwards = 0  # the readback says what this iteration alone has run
    model.reset_counts()
    rollout, reference = Rollout.load(step.rollout), load_arrays(step.ref_logprob / "ref.safetensors")["logprobs"]
    updates = plan_updates(ranks.samples_of(rollout), cfg, mesh)
    tokens = objectives.TokenData.of(rollout, reference, cfg)
    clock.append(time.perf_counter())
    old = old_logprobs(trainer, updates, tokens.size, cfg, mesh)
    clock.append(time.perf_counter())
    results = [one_update(trainer, update, tokens, old, cfg, mesh) for update in updates]
    clock.append(time.perf_counter())
    trainer.save_weights(out["weights"], step.weights_in)
    trainer.save_state(out["state"])
    ranks.write_readback(out["readbacks"], model, mesh, "training", {"forwards": trainer.forwards, "backwards": trainer.backwards})
    write_sidecars(out["sidecars"], mesh.rank, updates, tokens, old, results)
    if mesh.rank == 0:
        write_results(out["folder"], tokens, old, results)
    clock.append(time.perf_counter())
    names = ("data_preprocess_time", "log_probs_time", "actor_train_time", "export_time")
    return {name: b - a for name, a, b in zip(names, clock, clock[1:], strict=False)}


@dataclass(frozen=True)
class Update:
    """One optimizer step: whole groups, contiguous in canonical order, and this rank's micro-batches of them."""

    samples: range
    batches: list[TokenBatch]


@dataclass(frozen=True)
class UpdateEvidence:
    """What an optimizer step leaves behind; arrays fp32 [A] hold this step's tokens, zeros elsewhere."""

    metrics: dict[str, float]
    gradients: dict[str, str]  # sha256 by parameter
    current: Tensor
    entropy: Tensor


def plan_updates(samples: list[Sample], cfg: Config, mesh: Mesh) -> list[Update]:
    from pipeline.layout import micro_batches, owned_samples
    from stages.batch import pack

    count = len(samples) // cfg.objective.num_updates
    shape, size = mesh.shape, cfg.layout.samples_per_forward
    own = micro_batches(owned_samples(count, shape.dp, mesh.d), size, count, shape.dp)
    updates = []
    for first in range(0, len(samples), count):
        batches = [pack([samples[first + i] for i in indices], cfg.numerics.token_leaf, shape.cp, mesh.c) for indices in own]
        updates.append(Update(range(first, first + count), batches))
    return updates


def old_logprobs(trainer: Trainer, updates: list[Update], size: int, cfg: Config, mesh: Mesh) -> Tensor:
    """Logprobs by the trainer before its first step, complete on every rank: fp32 [A]."""
    import torch

    from stages.model import inverse_temperature
    from stages.ranks import ResponseArrays

    arrays = ResponseArrays(size, ("old",))
    with torch.no_grad():
        for batch in (b for update in updates for b in update.batches):
            logprobs, _ = trainer.forward(batch, inverse_temperature(cfg.sampling.temperature))
            arrays.put(batch.head_slots, old=logprobs)
    return arrays.gather(mesh)["old"]


def one_update(trainer: Trainer, update: Update, tokens: TokenData, old: Tensor, cfg: Config, mesh: Mesh) -> UpdateEvidence:
    """Forward and backward of every micro-batch, one exact sum of the gradients, one optimizer step, its metrics."""
    from stages import objectives
    from stages.model import inverse_temperature
    from stages.ranks import ResponseArrays

    arrays = ResponseArrays(tokens.size, ("current", "entropy"))
    _, divisor = objectives.slots_and_divisor(tokens, update.samples, cfg.objective)
    with trainer.accumulate():
        for batch in update.batches:
            logprobs, entropy = trainer.forward(batch, inverse_temperature(cfg.sampling.temperature))
            arrays.put(batch.head_slots, current=logprobs, entropy=entropy)
            own = tokens.at(batch.head_slots)
            g_logprob, g_entropy = objectives.coefficients(logprobs.detach(), old[batch.head_slots], own, cfg.objective)
            trainer.backward((g_logprob * logprobs).sum() + (g_entropy * entropy).sum())
    step = trainer.update(divisor)
    whole = arrays.gather(mesh)
    metrics = objectives.metrics(whole["current"], whole["entropy"], old, tokens, update.samples, cfg.objective)
    return UpdateEvidence(metrics | step.metrics(), step.gradients, whole["current"], whole["entropy"])


def write_results(folder: Path, tokens: TokenData, old: Tensor, results: list[UpdateEvidence]) -> None:
    """Arrays and metrics, and hashes of both beside those of the gradients: a later reader can tell whether these are the bytes."""
    from pipeline.digest import sha256_file, sha256_json, sha256_tensor, write_json
    from pipeline.records import save_arrays

    current = sum_of_steps(results, "current")
    arrays = {"old": old, "current": current, "entropy": sum_of_steps(results, "entropy"), "advantages": tokens.advantages}
    save_arrays(folder / "logprobs.safetensors", {name: x.numpy() for name, x in arrays.items()})
    write_json(folder / "metrics.json", {str(int(r.metrics["train/step"])): r.metrics for r in results})
    hashes = {
        "updates": [{"gradients": r.gradients} for r in results],
        "sha256": {name: sha256_tensor(x) for name, x in arrays.items()},
        "metrics": sha256_file(folder / "metrics.json"),
    }
    write_json(folder / "hashes.json", {**hashes, "digest": sha256_json(hashes)})


def sum_of_steps(results: list[UpdateEvidence], name: str) -> Tensor:
    """Steps own disjoint tokens: their bit patterns are added, so that no byte changes."""
    import torch

    return torch.stack([getattr(r, name) for r in results]).view(torch.int32).sum(0, dtype=torch.int32).view(torch.float32)


def write_sidecars(folder: Path, rank: int, updates: list[Update], tokens: TokenData, old: Tensor, results: list[UpdateEvidence]) -> None:
    """The logprobs of this rank's tokens, one file per micro-batch, for an offline comparison."""
    import torch

    from pipeline.records import save_arrays

    calls = ((batch.head_slots, result) for update, result in zip(updates, results, strict=True) for batch in update.batches)
    for call, (slots, result) in enumerate(calls):
        arrays = {"rollout": tokens.rollout[slots], "old": old[slots], "current": result.current[slots]}
        named = {"slots": slots.to(torch.int32), **arrays}
        save_arrays(folder / f"rank{rank:05d}.call{call:08d}.safetensors", {name: x.numpy() for name, x in named.items()})


if __name__ == "__main__":
    entry.run(main, "train")

"""Reference logprobs: the frozen checkpoint's logprob of every sampled token, for the KL term."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import entry

if TYPE_CHECKING:
    from stages.mesh import Mesh
    from stages.model import CausalLM


def main(job: entry.Job) -> None:
    with job.outputs(job.step.ref_logprob, job.step.readbacks / "ref_logprob") as out:
        job.launch(job.mesh_shape.world_size, folder=str(out[0]), readbacks=str(out[1]))


def rank_main(args: dict[str, Any]) -> dict[str, Any]:
    from stages import ranks

    job = entry.Job.from_args(args)
    mesh = ranks.start_mesh(job.mesh_shape, job.cfg.launch.threads, job.cfg.launch.kernel_build)
    model = build_reference(job, mesh)
    seconds = score(job, model, Path(args["folder"]), Path(args["readbacks"]))
    return {"ref_log_probs_time": seconds, "peak_memory": ranks.peak_memory()}


def build_reference(job: entry.Job, mesh: Mesh) -> CausalLM:
    """The checkpoint with its weights."""
    from stages import ranks
    from stages.model import implementations
    from stages.weights import load_slices, read_weights

    model = ranks.build_model(job.checkpoint, mesh, job.cfg, implementations(job.cfg.kernels, "training"))
    load_slices(model, read_weights(job.checkpoint))
    return model


def score(job: entry.Job, model: CausalLM, folder: Path, readbacks: Path) -> float:
    """Writes the logprobs of the iteration's tokens with the evidence; the seconds that it took."""
    import torch

    from pipeline.digest import sha256_tensor
    from pipeline.layout import micro_batches, owned_samples
    from pipeline.records import Rollout, save_arrays
    from stages import ranks
    from stages.batch import pack
    from stages.model import inverse_temperature
    from stages.weights import write_hashes

    cfg, mesh = job.cfg, model.par.mesh
    rollout = Rollout.load(job.step.rollout)
    samples = ranks.samples_of(rollout)
    results = ranks.ResponseArrays(len(rollout.logprobs), ("logprobs",))
    started = time.perf_counter()
    model.reset_counts()
    forwards, size = 0, cfg.layout.samples_per_forward
    with torch.no_grad():
        for indices in micro_batches(owned_samples(len(samples), mesh.shape.dp, mesh.d), size, len(samples), mesh.shape.dp):
            batch = pack([samples[i] for i in indices], cfg.numerics.token_leaf, mesh.shape.cp, mesh.c)
            logprobs, _ = model(batch, inverse_temperature(cfg.sampling.temperature))
            results.put(batch.head_slots, logprobs=logprobs)
            forwards += 1
    gathered = results.gather(mesh)
    ranks.write_readback(readbacks, model, mesh, "reference", {"forwards": forwards, "backwards": 0})
    if mesh.rank == 0:
        save_arrays(folder / "ref.safetensors", {name: x.numpy() for name, x in gathered.items()})
        write_hashes(folder, {name: sha256_tensor(x) for name, x in gathered.items()})
    return time.perf_counter() - started


if __name__ == "__main__":
    entry.run(main, "ref_logprob")

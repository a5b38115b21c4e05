"""Reference logprobs: the frozen checkpoint's logprob of every sampled token, for the KL term."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from stages import entry


def main(job: entry.Job) -> None:
    with job.outputs(job.step.ref_logprob, job.step.readbacks / "ref_logprob") as out:
        job.launch(job.mesh_shape.world_size, folder=str(out[0]), readbacks=str(out[1]))


def rank_main(args: dict[str, Any]) -> dict[str, Any]:
    import torch

    from pipeline.layout import micro_batches, owned_samples
    from pipeline.records import Rollout, save_arrays
    from stages import ranks
    from stages.batch import pack
    from stages.model import implementations, inverse_temperature
    from stages.weights import load_slices, read_weights

    job = entry.Job.from_args(args)
    cfg, layout = job.cfg, job.cfg.layout
    mesh = ranks.start_mesh(job.mesh_shape, cfg.launch.threads, cfg.launch.kernel_build)
    model = ranks.build_model(job.checkpoint, mesh, cfg, implementations(cfg.kernels.case, "training"))
    load_slices(model, read_weights(job.checkpoint))
    rollout = Rollout.load(job.step.rollout)
    samples = ranks.samples_of(rollout)
    results = ranks.ResponseArrays(len(rollout.logprobs), ("logprobs",))
    started = time.perf_counter()
    forwards = 0
    size = layout.samples_per_forward
    with torch.no_grad():
        for indices in micro_batches(owned_samples(len(samples), mesh.shape.dp, mesh.d), size, len(samples), mesh.shape.dp):
            batch = pack([samples[i] for i in indices], cfg.numerics.token_leaf, mesh.shape.cp, mesh.c)
            logprobs, _ = model(batch, inverse_temperature(cfg.sampling.temperature))
            results.put(batch.head_slots, logprobs=logprobs)
            forwards += 1
    gathered = results.gather(mesh)
    ranks.write_readback(Path(args["readbacks"]), model, mesh, "reference", {"forwards": forwards, "backwards": 0})
    if mesh.rank == 0:
        save_arrays(Path(args["folder"]) / "ref.safetensors", {name: x.numpy() for name, x in gathered.items()})
    return {"ref_log_probs_time": time.perf_counter() - started, "peak_memory": ranks.peak_memory()}


if __name__ == "__main__":
    entry.run(main, "ref_logprob")

"""Trace: a stage of one iteration run once more, with a hash of what every operation gives, forward and backward.

Rows go by sample and position and are hashed for each leaf of a sharded axis, so traces of any two layouts can be laid side by side.
`python -m pipeline.bisect` starts this module and compares what it writes; nothing here runs in a training.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import launch, registry
from pipeline.layout import owned_samples, stage_mesh
from stages import entry, ref_logprob, rollout, train

OUTPUTS = {"rollout": ("rollout", "readbacks"), "ref_logprob": ("ref_logprob", "readbacks"), "train": train.OUTPUTS}


@dataclass
class TraceJob(entry.Job):
    traced: str = ""  # the stage
    folder: Path = Path()  # new; gets rankNNNNN.safetensors and outputs/
    values: str | None = None  # an operation of which all values are kept, not only hashes


def parse(stage: str) -> TraceJob:
    parser = argparse.ArgumentParser(prog="python -m stages.trace")
    parser.add_argument("key", help="the run's key in params.yaml")
    parser.add_argument("--iteration", type=int, required=True)
    parser.add_argument("--stage", choices=OUTPUTS, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--values")
    args = parser.parse_args()
    launch.guard_process()
    registry.load()
    return TraceJob(stage, args.key, args.iteration, traced=args.stage, folder=args.folder, values=args.values)


def main(job: TraceJob) -> None:
    for name in OUTPUTS[job.traced]:
        (job.folder / "outputs" / name).mkdir(parents=True)
    world_size = stage_mesh(job.cfg.layout, job.traced).world_size
    job.launch(world_size, traced=job.traced, folder=str(job.folder), values=job.values)


def rank_main(args: dict[str, Any]) -> dict[str, Any]:
    from stages import ranks
    from stages.traced_model import Trace, TracedEngine, TracedTrainer
    from stages.weights import read_weights

    stage, folder = args["traced"], Path(args["folder"])
    job = entry.Job.from_args(args).of(stage, args["iteration"])
    mesh = ranks.start_mesh(stage_mesh(job.cfg.layout, stage), job.cfg.launch.threads, job.cfg.launch.kernel_build)
    out = [folder / "outputs" / name for name in OUTPUTS[stage]]
    match stage:
        case "rollout":
            engine = rollout.build_engine(job, mesh, TracedEngine)
            sampling = job.cfg.sampling
            owned = owned_samples(sampling.prompts_per_iteration * sampling.samples_per_prompt, mesh.shape.dp, mesh.d)
            trace = engine.trace = Trace(engine.model, args["values"], "rollout", owned.start)  # type: ignore[attr-defined]
            engine.load_weights(read_weights(job.step.weights_in), job.step.version_in)
            rollout.sample(job, engine, *out)
        case "ref_logprob":
            model = ref_logprob.build_reference(job, mesh)
            trace = Trace(model, args["values"], "reference")
            ref_logprob.score(job, model, *out)
        case _:
            trainer = train.build_trainer(job, mesh, TracedTrainer)
            trace = trainer.trace = Trace(trainer.model, args["values"], "train")  # type: ignore[attr-defined]
            train.train(job, trainer, dict(zip(OUTPUTS[stage], out, strict=True)))
    trace.write(folder / f"rank{mesh.rank:05d}.safetensors")
    return {}


if __name__ == "__main__":
    entry.run(main, "trace", parse)

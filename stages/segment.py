"""Segment: many iterations in one set of processes, rollout engine, reference model and trainer side by side.

New weights go from trainer to engine in memory. What lies on disk afterwards is what the stages rollout, ref_logprob and train would have
written, byte by byte: each iteration calls their functions. A run that was interrupted goes on after its last whole iteration.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.digest import read_json, sha256_file, sha256_folder, sha256_json, write_json
from pipeline.layout import stage_mesh
from pipeline.progress import Progress
from pipeline.segments import segments
from stages import entry, ref_logprob, rollout, train

if TYPE_CHECKING:
    from stages.mesh import Mesh


def main(job: entry.Job) -> None:
    with entry.single_writer(job.paths.logs(job.key) / "segment.lock"):
        journal = Journal(job)
        done = journal.resume()
        for segment in segments(job.cfg):
            if (first := max(segment.start, done + 1)) < segment.stop:
                job.launch(job.mesh_shape.world_size, first=first, stop=segment.stop, journal=journal.entry)
        journal.path.unlink()  # what is complete is DVC's


class Journal:
    """How far an interrupted run has come, and of what configuration, code and inputs: with others, it starts from the beginning."""

    def __init__(self, job: entry.Job):
        from dataclasses import asdict

        from pipeline.launch.address import fingerprint

        self.job, self.path = job, job.paths.logs(job.key) / "segment.json"
        folders = job.checkpoint / "tensors.json", job.paths.prompts(job.cfg.checkpoint.name, job.cfg.data.name) / "prompts.jsonl"
        sources = [sha256_file(path) for path in (*folders, job.paths.environment)]
        self.entry = {
            "path": str(self.path),
            "source": sha256_json([asdict(job.cfg), fingerprint({}), os.environ.get("LOCKSTEP_FRESH"), *sources]),
        }

    def resume(self) -> int:
        """Iterations that are complete. Without any, what lies in the run's folder is of another time, and goes."""
        try:
            record = read_json(self.path)
            done = int(record["done"]) if record["source"] == self.entry["source"] else 0
        except (OSError, ValueError, KeyError, TypeError):
            done = 0
        if done:
            print(f"{self.job.key}: goes on after iteration {done}", file=sys.stderr)
        else:
            shutil.rmtree(self.job.paths.run(self.job.key), ignore_errors=True)
            self.path.unlink(missing_ok=True)
        return done


def rank_main(args: dict[str, Any]) -> dict[str, Any]:
    from stages import ranks

    job = entry.Job.from_args(args).of("train", args["first"])
    launch, world_size = job.cfg.launch, job.mesh_shape.world_size
    ranks.start_process(world_size, launch.threads, launch.kernel_build)
    side = SideBySide(job, *(ranks.mesh_of(shape, world_size) for shape in (stage_mesh(job.cfg.layout, "rollout"), job.mesh_shape)))
    progress = Progress(f"{job.key} iterations", args["stop"] - args["first"]) if side.mesh.rank == 0 else contextlib.nullcontext()
    with progress as bar:
        for iteration in range(args["first"], args["stop"]):
            side.run(iteration)
            if bar is not None:
                write_json(args["journal"]["path"], {"done": iteration, "source": args["journal"]["source"]})
                bar.advance()
    return {"peak_memory": ranks.peak_memory()}


class SideBySide:
    """What one rank holds: an engine (none where sampling takes fewer ranks), the reference model and the trainer."""

    def __init__(self, job: entry.Job, rollout_mesh: Mesh, mesh: Mesh):
        """job: of the first iteration, whose weights and state are read from disk."""
        from stages.weights import read_weights

        self.idle_since = time.perf_counter()  # of the training; everything up to the next training block is waiting
        self.job, self.rollout_mesh, self.mesh = job, rollout_mesh, mesh
        self.engine = rollout.build_engine(job, rollout_mesh) if rollout_mesh.takes_part else None
        self.reference = ref_logprob.build_reference(job, mesh)
        self.trainer = train.build_trainer(job, mesh)
        started = time.perf_counter()
        if self.engine:
            self.engine.load_weights(read_weights(job.step.weights_in), job.step.version_in)
        self.update_weights_time = time.perf_counter() - started

    def run(self, iteration: int) -> None:
        """One iteration, and its weights into the engine."""
        from stages.handover import hand_over

        job = self.job.of("rollout", iteration)
        with self._outputs(job, job.step.rollout, job.step.readbacks / "rollout") as (out, times):
            seconds = rollout.sample(job, self.engine, *out) if self.engine else 0.0
            times |= {"rollout_time": seconds, "update_weights_time": self.update_weights_time}
            times["wall_time"] = time.perf_counter() - self.idle_since
        job = self.job.of("ref_logprob", iteration)
        with self._outputs(job, job.step.ref_logprob, job.step.readbacks / "ref_logprob") as (out, times):
            times["ref_log_probs_time"] = ref_logprob.score(job, self.reference, *out)
        job, s = self.job.of("train", iteration), job.step
        with self._outputs(job, s.train, s.weights_out, s.state_out, s.sidecars, s.readbacks / "train") as (out, times):
            times |= train.train(job, self.trainer, dict(zip(train.OUTPUTS, out, strict=True)))
            self.idle_since = time.perf_counter() - times["export_time"]
        started = time.perf_counter()
        hand_over(self.trainer, self.engine, self.rollout_mesh, s.version_out)
        self.update_weights_time = time.perf_counter() - started

    @contextlib.contextmanager
    def _outputs(self, job: entry.Job, *paths: Path) -> Iterator[tuple[list[Path], dict[str, float]]]:
        """Rank 0's new folders for all ranks, and the timings to fill in. The folders take their names when every rank is done."""
        from stages import ranks

        first, times = self.mesh.rank == 0, {}
        with entry.new_folders(*paths) if first else contextlib.nullcontext([]) as own:
            folders = ranks.broadcast_object(own)
            yield folders, times
            ranks.barrier()  # every rank has written
        if first:
            job.write_log({"status": "ok", "timings": times, "world_size": self.mesh.shape.world_size, "output": sha256_folder(paths[0])})
        ranks.barrier()  # the folders have their names


if __name__ == "__main__":
    entry.run(main, "segment")

"""Where everything lies, relative to the project folder unless `root` says otherwise. No name here depends on a layout's ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Paths:
    root: Path = ROOT

    def checkpoint(self, name: str) -> Path:
        return self.root / "runs" / "checkpoints" / name

    def prompts(self, checkpoint: str, data: str) -> Path:
        return self.root / "runs" / "prompts" / f"{checkpoint}--{data}"

    def run(self, key: str) -> Path:
        return self.root / "runs" / key

    def weights(self, key: str, version: int) -> Path:
        """Version 1 is the checkpoint; iteration i writes version i + 1."""
        return self.run(key) / "weights" / f"weight_v{version:06d}"

    def state(self, key: str, version: int) -> Path:
        """Adam's moments that belong to the weights of the same version."""
        return self.run(key) / "state" / f"state_v{version:06d}"

    def logs(self, key: str) -> Path:
        """Timings and statuses: git-ignored, never an output of DVC."""
        return self.root / "logs" / key

    def report(self, experiment: str) -> Path:
        return self.root / "reports" / experiment

    def validation(self, experiment: str, key: str) -> Path:
        """One file per run, all below one folder: DVC's comparison depends on that folder, whatever runs there are."""
        return self.report(experiment) / "runs" / key / "validation.json"

    def chain(self, experiment: str, key: str) -> Path:
        return self.validation(experiment, key).with_name("chain.json")

    def comparison(self, experiment: str) -> Path:
        return self.report(experiment) / "comparison.json"

    @property
    def params(self) -> Path:
        return self.root / "params.yaml"

    @property
    def environment(self) -> Path:
        return self.root / "env.json"


@dataclass(frozen=True)
class Step:
    """The files of one iteration of one run."""

    run: str
    iteration: int  # from 1
    rollout: Path
    ref_logprob: Path
    train: Path
    sidecars: Path
    readbacks: Path
    weights_in: Path
    weights_out: Path
    state_in: Path | None  # None in the first iteration: moments are zero
    state_out: Path

    @property
    def version_in(self) -> str:
        return f"weight_v{self.iteration:06d}"

    @property
    def version_out(self) -> str:
        return f"weight_v{self.iteration + 1:06d}"


def step(paths: Paths, key: str, iteration: int, checkpoint: str) -> Step:
    folder = paths.run(key) / f"i{iteration:04d}"
    first = iteration == 1
    return Step(
        run=key,
        iteration=iteration,
        rollout=folder / "rollout",
        ref_logprob=folder / "ref_logprob",
        train=folder / "train",
        sidecars=folder / "sidecars",
        readbacks=folder / "readbacks",
        weights_in=paths.checkpoint(checkpoint) if first else paths.weights(key, iteration),
        weights_out=paths.weights(key, iteration + 1),
        state_in=None if first else paths.state(key, iteration),
        state_out=paths.state(key, iteration + 1),
    )

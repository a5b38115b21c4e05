"""What lies in a run's folder, as links of its chain: every quantity with the hash, or exact value, of each of its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .chains import GRADIENT_NORM, chain_digest, digest_at, link_digest, places
from .checks import Checks
from .folders import Folder
from .metrics import iterations
from .tensor_files import Cache, TensorFile

Value = TypeVar("Value")
Place = tuple[int, str | None, str]  # iteration, step, quantity
ROLLOUT = {
    "prompts": {"prompt_ids": "prompt_ids", "sample_index": "sample_index", "prompt_lengths": "prompt_lengths"},
    "tokens": {"tokens": "tokens", "lengths": "lengths", "finish": "finish"},
    "rollout_logprob": {"logprobs": "logprobs"},
    "rewards": {"rewards": "rewards"},
}
REFERENCE = {"reference_logprob": {"logprobs": "logprobs"}}
TRAIN = {
    "old_logprob": {"logprobs": "old"},
    "current_logprob": {"logprobs": "current"},
    "entropy": {"entropy": "entropy"},
    "advantages": {"advantages": "advantages"},
}
FILES = {  # folder of an iteration, file: quantity -> part -> tensor
    ("rollout", "completions.safetensors"): ROLLOUT,
    ("ref_logprob", "ref.safetensors"): REFERENCE,
    ("train", "logprobs.safetensors"): TRAIN,
}


@dataclass
class RunFiles:
    """A run of the report and the folder that it names. A file that can't be read is a fault of its own, and its links have no parts."""

    run: dict[str, Any]  # of the report
    folder: Folder  # runs/KEY
    checks: Checks
    cache: Cache = field(default_factory=dict)  # one for all runs
    parts: dict[Place, dict[str, str]] = field(default_factory=dict)
    sources: dict[Place, TensorFile] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.run["run_id"]

    @property
    def whole(self) -> bool:
        """Whether the report says that every file was there and as it was written."""
        return self.run["validation"]["passed"]

    def attempt(self, read: Callable[[], Value]) -> Value | None:
        """What `read` returns; None, and a fault, when a file can't be read. What the report itself misses may be missing."""
        try:
            return read()
        except (OSError, ValueError) as error:
            fault = f"{self.key}: {error}"
            if fault not in self.checks.faults and (self.whole or not isinstance(error, FileNotFoundError)):
                self.checks.that(False, self.key, str(error))
            return None

    def json(self, *names: str) -> dict[str, Any]:
        return self.attempt(lambda: self.folder.below(*names[:-1]).json(names[-1])) or {}

    def tensors(self, *names: str) -> TensorFile | None:
        return self.attempt(lambda: TensorFile(self.folder.below(*names[:-1]), names[-1], self.cache))

    def arrays(self, iteration: int) -> dict[str, TensorFile | None]:
        """The files of an iteration's rollout, reference and training arrays, by folder."""
        at = {"rollout": "rewards", "ref_logprob": "reference_logprob", "train": "entropy"}
        return {name: self.sources.get((iteration, None, quantity)) for name, quantity in at.items()}

    def load(self) -> None:
        for number, steps in enumerate(iterations(self.run), 1):
            name = f"i{number:04d}"
            for (folder, file), quantities in FILES.items():
                source = self.tensors(name, folder, file)
                for quantity, tensors in quantities.items():
                    self._add((number, None, quantity), source, tensors)
            self._values(number, steps, name)
            version = f"{number + 1:06d}"
            for moment in ("exp_avg", "exp_avg_sq"):
                self._add((number, None, moment), self.tensors("state", f"state_v{version}", f"{moment}.safetensors"))
            self._add((number, None, "weights"), self.tensors("weights", f"weight_v{version}", "model.safetensors"))

    def _add(self, place: Place, source: TensorFile | None, tensors: dict[str, str] | None = None) -> None:
        hashes = source.hashes if source else {}
        self.parts[place] = {part: hashes[name] for part, name in (tensors or {name: name for name in hashes}).items() if name in hashes}
        if source:
            self.sources[place] = source

    def _values(self, number: int, steps: list[str], name: str) -> None:
        """Metrics, and gradients, of which the trainer left hashes only."""
        summary = self.json(name, "rollout", "summary.json").get("metrics")
        self.parts[number, None, "rollout_metrics"] = _hexes(summary)
        metrics, hashes = self.json(name, "train", "metrics.json"), self.json(name, "train", "hashes.json")
        updates = hashes.get("updates") or [hashes]
        for i, step in enumerate(steps):
            values = _hexes(metrics.get(step))
            norm = values.pop(GRADIENT_NORM, None)
            self.parts[number, step, "metrics"] = values
            self.parts[number, step, "gradient_norm"] = {GRADIENT_NORM: norm} if norm else {}
            update = updates[i] if isinstance(updates, list) and i < len(updates) else {}
            gradients = update.get("gradients") if isinstance(update, dict) else None
            self.parts[number, step, "gradients"] = gradients if isinstance(gradients, dict) else {}

    def add_checkpoint(self, checkpoints: Folder, name: str | None) -> None:
        """Version 1 of the weights. Without a name, the checkpoint whose recorded digest is that of the report."""
        wanted = digest_at(self.run, 0, None, "weights")
        for own in [name] if name else checkpoints.names():
            folder = self.attempt(lambda own=own: checkpoints.below(own))
            if folder and (name or _recorded(folder) == wanted):
                self._add((0, None, "weights"), self.attempt(lambda folder=folder: TensorFile(folder, "model.safetensors", self.cache)))
                return
        self.checks.that(False, self.key, f"{checkpoints.shown}: no checkpoint's weights have the digest of version 1")

    def chain(self) -> list[dict[str, Any]]:
        """The chain of the files, without the checkpoint's element where that is not at hand."""
        elements: list[dict[str, Any]] = []
        for number, steps in enumerate([[], *iterations(self.run)]):
            order = places(number, steps) if number else [(0, None, "weights")]
            quantities = {quantity: link_digest(self.parts.get((n, s, quantity), {})) for n, s, quantity in order if s is None}
            links: dict[str, dict[str, str | None]] = {step: {} for step in steps}
            for n, step, quantity in order:
                if step is not None:
                    links[step][quantity] = link_digest(self.parts.get((n, step, quantity), {}))
            previous = elements[-1]["digest"] if elements else None
            element: dict[str, Any] = {"iteration": number, "previous": previous, "quantities": quantities, "steps": links}
            elements.append({**element, "digest": chain_digest(element)})
        return elements


def _hexes(values: Any) -> dict[str, str]:
    """Exact values of metrics; what is no number has none and so differs from any that the report has."""
    if not isinstance(values, dict):
        return {}
    found = {}
    for name, value in values.items():
        number = float(value) if isinstance(value, float | int) or value in ("NaN", "Infinity", "-Infinity") else None
        found[name] = "no number" if number is None else number.hex()
    return found


def _recorded(folder: Folder) -> Any:
    try:
        return folder.json("tensors.json").get("digest")
    except (OSError, ValueError):
        return None

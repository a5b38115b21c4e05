"""What a run left on disk, as links of a chain: every quantity with the sha256 of the bytes that are in its files now.

Nothing here trusts a recorded hash where the bytes are stored: tokens, logprobs, weights and Adam moments are read and hashed again.
Gradients live only as the hashes that the trainer took (`hashes.json`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.digest import hash_safetensors, sha256_json, tensors_digest
from pipeline.evidence.recorded import hexes, read_metrics, read_object, read_summary
from pipeline.paths import Paths

# Causal order inside an iteration; `None` marks where the optimizer steps come, each with STEP_QUANTITIES.
QUANTITIES = (
    "prompts", "tokens", "rollout_logprob", "reference_logprob", "old_logprob", "current_logprob", "entropy", "rewards",
    "advantages", "rollout_metrics", None, "exp_avg", "exp_avg_sq", "weights",
)  # fmt: skip
STEP_QUANTITIES = ("metrics", "gradients", "gradient_norm")
# What each link is made from: quantities of the same iteration, or of the one before it.
PARENTS = {
    "prompts": (),
    "tokens": ("prompts", "previous.weights"),
    "rollout_logprob": ("tokens", "previous.weights"),
    "rewards": ("prompts", "tokens"),
    "rollout_metrics": ("tokens", "rewards"),
    "reference_logprob": ("tokens", "first.weights"),
    "old_logprob": ("tokens", "previous.weights"),
    "current_logprob": ("tokens", "previous.weights"),
    "entropy": ("tokens", "previous.weights"),
    "advantages": ("rewards",),
    "metrics": ("rollout_logprob", "reference_logprob", "old_logprob", "current_logprob", "entropy", "advantages"),
    "gradients": ("tokens", "current_logprob", "old_logprob", "reference_logprob", "advantages", "previous.weights"),
    "gradient_norm": ("gradients",),
    "exp_avg": ("gradients", "gradient_norm", "previous.exp_avg"),
    "exp_avg_sq": ("gradients", "gradient_norm", "previous.exp_avg_sq"),
    "weights": ("exp_avg", "exp_avg_sq", "previous.weights"),
}
GRADIENT_NORM = "train/grad_norm"
REQUIRED_METRICS = ("train/loss", GRADIENT_NORM, "train/step")  # a step that does not report these proves nothing


@dataclass(frozen=True)
class RunFiles:
    """Where the files of one run lie. Version 1 of the weights is the checkpoint itself."""

    key: str
    paths: Paths
    checkpoint: str  # its name
    iterations: int
    num_updates: int = 1  # optimizer steps an iteration

    @classmethod
    def of(cls, cfg: Any, key: str, paths: Paths) -> RunFiles:
        return cls(key, paths, cfg.checkpoint.name, cfg.iterations, cfg.objective.num_updates)

    @property
    def project(self) -> Path:
        return self.paths.root

    @property
    def checkpoint_folder(self) -> Path:
        return self.paths.checkpoint(self.checkpoint)

    def iteration(self, number: int) -> Path:
        return self.paths.run(self.key) / f"i{number:04d}"

    def logs(self, number: int) -> Path:
        return self.paths.logs(self.key) / f"i{number:04d}"

    def weights(self, version: int) -> Path:
        return self.checkpoint_folder if version == 1 else self.paths.weights(self.key, version)

    def state(self, version: int) -> Path:
        return self.paths.state(self.key, version)

    def steps(self, iteration: int) -> range:
        """Optimizer steps of an iteration, counted from 0 over the run."""
        return range((iteration - 1) * self.num_updates, iteration * self.num_updates)


@dataclass(frozen=True)
class Link:
    """One quantity of one iteration (and optimizer step): the hash, or exact hex value, of each of its parts."""

    iteration: int
    quantity: str
    parts: dict[str, str]
    step: int | None = None
    source: Path | None = None  # safetensors file that holds the parts; None: the parts are the values, or only hashes exist
    tensors: dict[str, str] = field(default_factory=dict)  # part -> tensor name in that file, where they differ

    @property
    def digest(self) -> str | None:
        return tensors_digest(self.parts) if self.parts else None

    @property
    def place(self) -> tuple[int, int | None, str]:
        return self.iteration, self.step, self.quantity


@dataclass
class Evidence:
    """The chain of a run, and what was missing or unreadable on the way."""

    files: RunFiles
    links: list[Link]
    problems: list[str]

    @cached_property
    def by_place(self) -> dict[tuple[int, int | None, str], Link]:
        return {link.place: link for link in self.links}

    def link(self, iteration: int, quantity: str, step: int | None = None) -> Link | None:
        return self.by_place.get((iteration, step, quantity))

    @cached_property
    def chain(self) -> list[dict[str, Any]]:
        """One element per iteration, 0 = the checkpoint, each with the digest of the one before: prompts -> ... -> weights."""
        elements: list[dict[str, Any]] = []
        for iteration in range(self.files.iterations + 1):
            own = [link for link in self.links if link.iteration == iteration]
            element: dict[str, Any] = {"iteration": iteration, "previous": elements[-1]["digest"] if elements else None}
            element["quantities"] = {link.quantity: link.digest for link in own if link.step is None}
            steps = sorted({link.step for link in own if link.step is not None})
            element["steps"] = {str(s): {link.quantity: link.digest for link in own if link.step == s} for s in steps}
            elements.append({**element, "digest": chain_digest(element)})
        return elements

    @property
    def result_digest(self) -> str:
        """One sha256 for everything the run computed, whatever its layout."""
        return self.chain[-1]["digest"]


def chain_digest(element: Mapping[str, Any]) -> str:
    """Digest of an element of a chain, its own `digest` field left out: what anyone can recompute from a report."""
    return sha256_json({key: value for key, value in element.items() if key != "digest"})


def hash_file_once(path: Path, cache: dict[tuple[int, ...], dict[str, str]]) -> dict[str, str]:
    """`hash_safetensors`, once per file on disk: equal outputs of several runs are often links to one file of DVC's cache."""
    stat = os.stat(path)
    identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    if identity not in cache:
        cache[identity] = hash_safetensors(path)
    return cache[identity]


class _Reader:
    def __init__(self, files: RunFiles, cache: dict):
        self.files, self.cache = files, cache
        self.links: list[Link] = []
        self.problems: list[str] = []

    def tensors(self, path: Path) -> dict[str, str]:
        try:
            return hash_file_once(path, self.cache)
        except (OSError, ValueError, KeyError) as error:
            self._problem(path, error)
            return {}

    def json(self, path: Path, read: Callable[[Path], dict[str, Any]] = read_object) -> dict[str, Any]:
        try:
            return read(path)
        except (OSError, ValueError) as error:
            self._problem(path, error)
            return {}

    def _problem(self, path: Path, error: Exception) -> None:
        kind = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        text = f"{relative(path, self.files.project)} {kind}"
        if text not in self.problems:
            self.problems.append(text)

    def _lacks(self, path: Path, what: str) -> None:
        self.problems.append(f"{relative(path, self.files.project)} has no {what}")

    def add(self, iteration: int, quantity: str, path: Path | None, parts: Mapping[str, str], step: int | None = None) -> None:
        """A link of all the parts there are."""
        self.links.append(Link(iteration, quantity, dict(parts), step, path))

    def pick(self, iteration: int, quantity: str, path: Path, parts: Mapping[str, str], **tensors: str) -> None:
        """A link of some tensors of a file, part=tensor name; one that the file lacks is left out and reported."""
        picked = {part: parts[tensor] for part, tensor in tensors.items() if tensor in parts}
        if parts and (absent := [tensor for tensor in tensors.values() if tensor not in parts]):
            self._lacks(path, ", ".join(absent))
        self.links.append(Link(iteration, quantity, picked, None, path, tensors))

    def iteration(self, number: int) -> None:
        folder = self.files.iteration(number)
        path = folder / "rollout" / "completions.safetensors"
        rollout = self.tensors(path)
        self.pick(number, "prompts", path, rollout, prompt_ids="prompt_ids", sample_index="sample_index", prompt_lengths="prompt_lengths")
        self.pick(number, "tokens", path, rollout, tokens="tokens", lengths="lengths", finish="finish")
        self.pick(number, "rollout_logprob", path, rollout, logprobs="logprobs")
        self.pick(number, "rewards", path, rollout, rewards="rewards")
        path = folder / "ref_logprob" / "ref.safetensors"
        self.pick(number, "reference_logprob", path, self.tensors(path), logprobs="logprobs")
        self._train(number, folder / "train")
        path = folder / "rollout" / "summary.json"
        summary = self.json(path, read_summary)
        if summary and not summary.get("metrics"):
            self._lacks(path, "metrics")
        self.add(number, "rollout_metrics", None, hexes(summary.get("metrics", {})))
        self._steps(number, folder / "train")
        self._next_version(number + 1, number)
        order = {name: i for i, name in enumerate(QUANTITIES)}
        own = [link for link in self.links if link.iteration == number]
        rest = [link for link in self.links if link.iteration != number]
        # sorted() is stable: optimizer steps stay in order, each as metrics, gradients, norm
        self.links = rest + sorted(own, key=lambda link: order[None if link.step is not None else link.quantity])

    def _train(self, number: int, folder: Path) -> None:
        path = folder / "logprobs.safetensors"
        stored = self.tensors(path)
        self.pick(number, "old_logprob", path, stored, logprobs="old")
        self.pick(number, "current_logprob", path, stored, logprobs="current")
        self.pick(number, "entropy", path, stored, entropy="entropy")
        self.pick(number, "advantages", path, stored, advantages="advantages")

    def _steps(self, number: int, folder: Path) -> None:
        metrics, hashes = self.json(folder / "metrics.json", read_metrics), self.json(folder / "hashes.json")
        updates = updates_of(hashes)
        for i, step in enumerate(self.files.steps(number)):
            values = metrics.get(str(step), {})
            if metrics and not values:
                self._lacks(folder / "metrics.json", f"step {step}")
            # what every run lacks would be equal in all of them
            for name in REQUIRED_METRICS if values else ():
                if name not in values:
                    self._lacks(folder / "metrics.json", f"{name} of step {step}")
            forward = {name: value for name, value in values.items() if name != GRADIENT_NORM}
            self.add(number, "metrics", None, hexes(forward), step=step)
            gradients = updates[i].get("gradients") if i < len(updates) else None
            gradients = gradients if isinstance(gradients, dict) else {}
            if hashes and not gradients:
                self._lacks(folder / "hashes.json", f"gradients of step {step}")
            self.add(number, "gradients", None, gradients, step=step)
            norm = {GRADIENT_NORM: values[GRADIENT_NORM]} if GRADIENT_NORM in values else {}
            self.add(number, "gradient_norm", None, hexes(norm), step=step)

    def _next_version(self, version: int, number: int) -> None:
        for moment in ("exp_avg", "exp_avg_sq"):
            path = self.files.state(version) / f"{moment}.safetensors"
            self.add(number, moment, path, self.tensors(path))
        path = self.files.weights(version) / "model.safetensors"
        self.add(number, "weights", path, self.tensors(path))


def read_evidence(files: RunFiles, cache: dict | None = None) -> Evidence:
    """Hash every file of a run. Missing or damaged files become problems and empty links, not exceptions."""
    reader = _Reader(files, {} if cache is None else cache)
    path = files.weights(1) / "model.safetensors"
    reader.add(0, "weights", path, reader.tensors(path))
    for number in range(1, files.iterations + 1):
        reader.iteration(number)
    return Evidence(files, reader.links, reader.problems)


def updates_of(hashes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What hashes.json holds per optimizer step: the list `updates`, or the file itself when there is only one step."""
    updates = hashes.get("updates") or [dict(hashes)]
    return updates if isinstance(updates, list) and all(isinstance(update, dict) for update in updates) else []


def relative(path: Path, project: Path) -> str:
    """For reports: they must not name folders of the machine they were made on."""
    return str(path.relative_to(project)) if path.is_relative_to(project) else path.name

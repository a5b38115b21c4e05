"""Hashes that the stages recorded when they wrote, against those of the bytes that are there now.

Layouts with equal results share one object of DVC's cache. When it is damaged, all runs are, and the comparison sees them equal: only what
was recorded beside it can tell.

    weights, state, ref_logprob     tensors.json    sha256 of each tensor, digest of these
    rollout                         summary.json    sha256 of each array, digest of the summary
    train                           hashes.json     sha256 of each array, metrics: of metrics.json, digest of the hashes
"""

from __future__ import annotations

from pathlib import Path

from pipeline.digest import sha256_file, sha256_json, tensors_digest
from pipeline.evidence.chain import Evidence, RunFiles, relative
from pipeline.evidence.recorded import recorded_object

RECORDS = {"completions.safetensors": "summary.json", "logprobs.safetensors": "hashes.json"}  # where the hashes of a file of tensors are


def check_hashes(evidence: Evidence) -> list[str]:
    """What was recorded of every file of tensors, and of metrics.json."""
    files, errors = evidence.files, []
    for record, stored in stored_beside(evidence).items():
        errors += _compare_recorded(record, stored, files)
    for iteration in range(1, files.iterations + 1):
        train = files.iteration(iteration) / "train"
        if (sha := sha256_or_none(train / "metrics.json")) != recorded_object(train / "hashes.json").get("metrics"):
            errors.append(f"{relative(train / 'hashes.json', files.project)}: metrics is not the sha256 of metrics.json, which is {sha}")
    return errors


def stored_beside(evidence: Evidence) -> dict[Path, dict[str, str]]:
    """{file that records hashes: {name in it: hash of the bytes there are}}."""
    records: dict[Path, dict[str, str]] = {}
    for link in evidence.links:
        if link.source is not None and link.source.exists():
            prefix = f"{link.quantity}/" if link.quantity in ("exp_avg", "exp_avg_sq") else ""  # Adam's two files share a record
            record = link.source.parent / RECORDS.get(link.source.name, "tensors.json")
            own = {f"{prefix}{link.tensors.get(part, part)}": sha for part, sha in link.parts.items()}
            records.setdefault(record, {}).update(own)
    return records


def _compare_recorded(path: Path, stored: dict[str, str], files: RunFiles) -> list[str]:
    content, place = recorded_object(path), relative(path, files.project)
    recorded, digest = content.get("sha256"), content.pop("digest", None)
    if not isinstance(recorded, dict):
        return [f"{place}: no sha256 to hold the stored bytes against"]
    if digest != (tensors_digest(recorded) if path.name == "tensors.json" else sha256_json(content)):
        return [f"{place}: digest is not that of its {'sha256' if path.name == 'tensors.json' else 'content'}"]
    unequal = sorted(name for name in {*recorded, *stored} if recorded.get(name) != stored.get(name))
    if not unequal:
        return []
    return [f"{place}: sha256 of {len(unequal)} tensors is not the hash of the stored bytes (the first: {unequal[0]})"]


def check_gradients(evidence: Evidence) -> list[str]:
    """A gradient hash for every tensor that was trained, and for no other: what all runs lack would be equal in all of them."""
    errors = []
    for link in evidence.links:
        weights = evidence.link(link.iteration, "weights")
        if link.quantity == "gradients" and link.parts and weights and set(link.parts) != set(weights.parts):
            name = min(set(link.parts) ^ set(weights.parts))
            errors.append(
                f"i{link.iteration:04d}: gradients of step {link.step} and weights are not of the same tensors (the first: {name})"
            )
    return errors


def check_model_files(files: RunFiles) -> list[str]:
    """The small files beside exported weights are the checkpoint's own bytes; config.json decides what the weights mean."""
    errors = []
    for version in range(2, files.iterations + 2):
        for name in ("config.json", "generation_config.json"):
            path = files.weights(version) / name
            if sha256_or_none(path) != sha256_or_none(files.checkpoint_folder / name):
                errors.append(f"{relative(path, files.project)}: is not the checkpoint's {name}")
    return errors


def sha256_or_none(path: Path) -> str | None:
    try:
        return sha256_file(path)
    except OSError:
        return None

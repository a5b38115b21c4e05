"""Offline comparison of logprobs from the tensors that every rank dumped at every call, byte by byte (+0 and -0 differ).

A sidecar `rank00003.call00000001.safetensors` holds, for the response tokens of one micro-batch that this rank computed:

    slots int32 [n]     index of each token in the packed response arrays of the iteration
    rollout fp32 [n]    logprob recorded by the rollout engine
    old fp32 [n]        logprob of the trainer before the iteration's first step
    current fp32 [n]    logprob of the forward that made the gradients
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.layout import MeshShape

SIDES = ("rollout", "old", "current")


def bits(array: np.ndarray) -> np.ndarray:
    """fp32 values as their 32-bit patterns: NaN equals itself and -0 is not +0."""
    return np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)


def sidecar_names(world_size: int, calls: int) -> list[str]:
    return [f"rank{rank:05d}.call{call:08d}.safetensors" for rank in range(world_size) for call in range(calls)]


@dataclass
class SidecarComparison:
    """Sidecars of all iterations against each other and against the iteration's own arrays."""

    mesh: MeshShape
    num_updates: int
    artifacts: list[str] = field(default_factory=list)
    comparable: int = 0
    errors: list[str] = field(default_factory=list)
    rows: list[dict[str, np.ndarray]] = field(default_factory=list)  # one per iteration, SIDES in slot order
    sample_count: int = 0

    def read(self, folder: Path, place: str, calls: int, arrays: dict[str, np.ndarray], num_samples: int) -> None:
        """One iteration. arrays: SIDES fp32 [A] as the stages stored them; every token must be in the sidecars of its tp ranks."""
        names = sidecar_names(self.mesh.world_size, calls)
        found = {path.name for path in folder.glob("*.safetensors")} if folder.is_dir() else set()
        self.errors += [f"{place}/{name}: sidecar is missing" for name in names if name not in found]
        self.errors += [f"{place}/{name}: sidecar of a rank or call that the layout doesn't have" for name in sorted(found - set(names))]
        size = len(arrays["rollout"])
        row = {side: np.full(size, np.nan, dtype=np.float32) for side in SIDES}
        seen = np.zeros(size, dtype=np.int64)
        for name in sorted(found & set(names)):
            self.artifacts.append(f"{place}/{name}")
            tensors = self._load(folder / name, f"{place}/{name}", size)
            if tensors is None:
                continue
            self.comparable += 1
            np.add.at(seen, tensors["slots"], 1)
            for side in SIDES:
                self._compare(f"{place}/{name}", side, tensors, arrays[side])
                row[side][tensors["slots"]] = tensors[side]
        if (wrong := np.flatnonzero(seen != self.mesh.tp)).size:
            times = int(seen[wrong[0]])
            self.errors.append(
                f"{place}: {wrong.size} response tokens are not in exactly {self.mesh.tp} sidecars (the first: slot {wrong[0]}, in {times})"
            )
        self.rows.append({side: values[seen > 0] for side, values in row.items()})
        self.sample_count += num_samples

    def _load(self, path: Path, place: str, size: int) -> dict[str, np.ndarray] | None:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            tensors = load_file(path)
            if missing := {"slots", *SIDES} - set(tensors):
                raise ValueError(f"no {', '.join(sorted(missing))}")
            slots = tensors["slots"].astype(np.int64)
            if any(tensors[side].shape != slots.shape or tensors[side].dtype != np.float32 for side in SIDES):
                raise ValueError("rollout, old and current must be fp32, one value per slot")
            if slots.size and (slots.min() < 0 or slots.max() >= size):
                raise ValueError(f"slot outside 0..{size - 1}")
        except (OSError, ValueError, SafetensorError) as error:
            self.errors.append(f"{place}: {error}")
            return None
        return {**tensors, "slots": slots}

    def _compare(self, place: str, side: str, tensors: dict[str, np.ndarray], whole: np.ndarray) -> None:
        if len(whole) == 0:
            return
        own, stored = tensors[side], whole[tensors["slots"]]
        unequal = np.flatnonzero(bits(own) != bits(stored))
        if unequal.size:
            i = unequal[0]
            values = f"{value_hex(own[i])} against {value_hex(stored[i])}"
            self.errors.append(
                f"{place}: {unequal.size} {side} logprobs differ from the iteration's (slot {tensors['slots'][i]}: {values})"
            )

    def offline(self) -> dict[str, Any]:
        """`offline_tensor_comparison` of the validation."""
        available = bool(self.artifacts)
        return {
            "artifact_count": len(self.artifacts),
            "comparable_artifact_count": self.comparable,
            "reason": None if available else "no sidecars",
            "status": "available" if available else "unavailable",
        }

    def finish(self) -> dict[str, Any]:
        """`train_rollout_logprob` of the validation: the trainer's old logprobs against the rollout's, then current against both."""
        rollout, old, current = (self._all(side) for side in SIDES)
        mismatch = count_unequal(rollout, old)
        current_rollout, current_old = count_unequal(current, rollout), count_unequal(current, old)
        errors = list(self.errors)
        if mismatch:
            errors.append(f"{mismatch} of {len(old)} old logprobs differ in bits from the rollout's{first_pair(old, rollout)}")
        if self.num_updates == 1 and current_old:
            errors.append(f"{current_old} of {len(old)} current logprobs differ in bits from the old ones{first_pair(current, old)}")
        if not len(old):
            errors.append("no response token to compare")
        return {
            "artifacts": self.artifacts,
            "bitwise_equal": mismatch == 0,
            "bitwise_mismatch_count": mismatch,
            "current_old_mismatch_count": current_old,
            "current_rollout_mismatch_count": current_rollout,
            "element_count": len(old),
            "errors": errors,
            "mismatch_count": mismatch,
            "passed": not errors,
            "require_exact": True,
            "sample_count": self.sample_count,
            "torch_equal": bool(np.array_equal(old, rollout)),  # what torch.equal says of the values: +0 equals -0, a NaN equals nothing
            **differences(old, rollout),
        }

    def _all(self, side: str) -> np.ndarray:
        return np.concatenate([row[side] for row in self.rows]) if self.rows else np.zeros(0, dtype=np.float32)


def count_unequal(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.count_nonzero(bits(a) != bits(b)))


def first_pair(a: np.ndarray, b: np.ndarray) -> str:
    unequal = np.flatnonzero(bits(a) != bits(b))
    return f" (the first: {value_hex(a[unequal[0]])} against {value_hex(b[unequal[0]])})" if unequal.size else ""


def value_hex(value: Any) -> str:
    """An element of an array: its bit pattern as 0x..., with the value beside it."""
    array = np.asarray(value)
    pattern = array.astype(array.dtype.newbyteorder(">")).tobytes().hex()
    return f"0x{pattern} ({array.item()!r})"


def differences(old: np.ndarray, rollout: np.ndarray) -> dict[str, float]:
    """Mean and largest |old - rollout|, and two estimates of KL(rollout || trainer): mean(lr - lo); mean(e^x - x - 1), x = lo - lr."""
    n = max(len(old), 1)
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is NaN here, and says so in the report
        x = old.astype(np.float64) - rollout.astype(np.float64)
        k3 = np.expm1(x) - x
    return {
        "max_abs_diff": float(np.max(np.abs(x), initial=0.0)),
        "mismatch_k3_kl": _sum(k3) / n,
        "mismatch_kl": _sum(-x) / n + 0.0,  # + 0.0: no mismatch at all is 0, not -0
        "train_rollout_logprob_abs_diff": _sum(np.abs(x)) / n,
    }


def _sum(values: np.ndarray) -> float:
    return math.fsum(_finite_or_nan(values))


def _finite_or_nan(values: np.ndarray) -> Iterator[float]:
    """fsum refuses inf - inf; such a sum is NaN."""
    return iter(values.tolist()) if np.isfinite(values).all() else iter([math.nan])

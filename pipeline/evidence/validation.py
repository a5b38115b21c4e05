"""Validation of one run: is everything there, is it what was asked for, and do trainer and rollout agree on every logprob?

The fields are those of the published consistency report; `current_*_mismatch_count`, `file_hashes` and `layout` are
ours. Nothing raises for a bad run: every fault is a line in `errors`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.digest import float_hex, read_json, write_json
from pipeline.evidence.chain import GRADIENT_NORM, Evidence, RunFiles, read_evidence, relative, updates_of
from pipeline.evidence.hashes import check_gradients, check_hashes, check_model_files, sha256_or_none
from pipeline.evidence.readbacks import count_micro_batches, read_frameworks
from pipeline.evidence.recorded import read_metrics, recorded_object
from pipeline.evidence.sidecars import SidecarComparison, count_unequal
from pipeline.layout import layout_name, stage_mesh
from pipeline.records import tokens_sha256

SCHEMA_VERSION = "lockstep.validation.v1"
MISMATCH = "train/train_current_rollout_logprob_mismatch_count"
MAX_ABS_DIFF = "train/train_current_rollout_logprob_max_abs_diff"
NUMEL = "train/train_current_rollout_logprob_numel"
ABS_DIFF = "train/train_rollout_logprob_abs_diff"
SCHEMAS = Path(__file__).parents[1] / "verify" / "schemas"  # with the verifier, whose folder is copied and read alone
EAGER = {"applicable": False, "reason": "the CPU engine runs every step eagerly; there is no graph to capture"}


def validate(cfg: Any, files: RunFiles, evidence: Evidence | None = None) -> dict[str, Any]:
    """The validation record of one run. cfg: the run's whole configuration (`pipeline.config.Config` or its OmegaConf form)."""
    evidence = evidence or read_evidence(files)
    errors = [*evidence.problems, *check_gradients(evidence), *check_hashes(evidence), *check_model_files(files)]
    rollouts = {i: _arrays(files, i, errors) for i in range(1, files.iterations + 1)}
    complete = {i: arrays for i, arrays in rollouts.items() if arrays is not None}
    for iteration, arrays in complete.items():
        errors += check_iteration(cfg, files, iteration, arrays)
    lengths = {i: (a["lengths"] - a["prompt_lengths"]).tolist() for i, a in complete.items()}
    num_layers = _num_layers(files, errors)
    frameworks = read_frameworks(files.iteration, cfg.layout, cfg.kernels, num_layers, lengths, files.num_updates, cfg.launch.kernel_build)
    sidecars = compare_sidecars(cfg, files, complete)
    logprob, scalar = sidecars.finish(), scalar_rows(files, complete)
    errors += [*frameworks["errors"], *scalar["errors"], *logprob["errors"]]
    return {
        "cudagraph": EAGER,
        "errors": errors,
        "file_hashes": {
            "result_digest": evidence.result_digest,
            "tensors_read": sum(len(link.parts) for link in evidence.links if link.source),
        },
        "group": "consistency",
        "layout": layout_name(cfg.layout.tp, cfg.layout.cp, cfg.layout.dp, cfg.layout.zero),
        "offline_tensor_comparison": sidecars.offline(),
        "passed": not errors,
        "run_id": files.key,
        "runtime_readbacks": frameworks,
        "runtime_scalar_logprob": scalar,
        "schema_version": SCHEMA_VERSION,
        "train_rollout_logprob": logprob,
    }


def write_validation(path: Path, validation: dict[str, Any]) -> None:
    """Write the record if it fits its schema (jsonschema.ValidationError otherwise: our fault, not the run's)."""
    check_schema("validation", validation)
    write_json(path, validation)


def check_schema(name: str, instance: Any) -> None:
    import jsonschema

    jsonschema.validate(instance, read_json(SCHEMAS / f"{name}.schema.json"))


def _arrays(files: RunFiles, iteration: int, errors: list[str]) -> dict[str, np.ndarray] | None:
    """Arrays of an iteration, logprobs as rollout, reference, old, current; None, and an error, when they cannot be checked."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    folder = files.iteration(iteration)
    try:
        arrays = load_file(folder / "rollout" / "completions.safetensors")
        arrays["rollout"] = arrays.pop("logprobs")
        arrays["reference"] = load_file(folder / "ref_logprob" / "ref.safetensors")["logprobs"]
        train = load_file(folder / "train" / "logprobs.safetensors")
        needed = ("tokens", "lengths", "prompt_lengths", "prompt_ids", "sample_index", "finish", "rewards")
        arrays = {**{name: arrays[name] for name in (*needed, "rollout", "reference")}, "old": train["old"], "current": train["current"]}
        for name, array in arrays.items():
            wanted = np.float32 if name in ("rollout", "reference", "old", "current", "rewards") else np.int32
            if array.dtype != wanted or array.ndim != 1:  # compared as 32-bit patterns, one a token or sample
                raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, expected a row of {np.dtype(wanted)}")
        return arrays
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = "a file is missing" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
        errors.append(f"i{iteration:04d}: logprobs and tokens were not compared ({reason})")
        return None


def _num_layers(files: RunFiles, errors: list[str]) -> int:
    path = files.checkpoint_folder / "config.json"
    try:
        return int(read_json(path)["num_hidden_layers"])
    except (OSError, ValueError, KeyError) as error:
        errors.append(f"{relative(path, files.project)}: num_hidden_layers cannot be read ({error})")
        return 0


def check_iteration(cfg: Any, files: RunFiles, iteration: int, arrays: dict[str, np.ndarray]) -> list[str]:
    """Counts, shapes, steps and the numbers that follow from the arrays."""
    place, errors = f"i{iteration:04d}", []

    def expect(what: str, value: Any, expected: Any) -> None:
        if value != expected:
            errors.append(f"{place}: {what} is {value}, expected {expected}")

    num_samples = cfg.sampling.prompts_per_iteration * cfg.sampling.samples_per_prompt
    for name in ("lengths", "prompt_lengths", "prompt_ids", "sample_index", "finish", "rewards"):
        expect(f"number of samples in {name}", len(arrays[name]), num_samples)
    responses = int((arrays["lengths"] - arrays["prompt_lengths"]).sum())
    expect("number of tokens", len(arrays["tokens"]), int(arrays["lengths"].sum()))
    for name in ("rollout", "reference", "old", "current"):
        expect(f"number of {name} logprobs", len(arrays[name]), responses)
    summary = recorded_object(files.iteration(iteration) / "rollout" / "summary.json")
    expect("tokens_sha256 of the rollout's summary", summary.get("tokens_sha256"), tokens_sha256(arrays))
    expect(
        "sha256 of completions.jsonl",
        sha256_or_none(files.iteration(iteration) / "rollout" / "completions.jsonl"),
        summary.get("completions_sha256"),
    )
    expect("weight_version of the rollout", summary.get("weight_version"), f"weight_v{iteration:06d}")
    expect("sample_count", summary.get("sample_count"), num_samples)
    expect("token_count", summary.get("token_count"), len(arrays["tokens"]))
    metrics = recorded_object(files.iteration(iteration) / "train" / "metrics.json", read_metrics)
    steps = [str(step) for step in files.steps(iteration)]
    expect("optimizer steps in metrics.json", sorted(metrics, key=int), steps)
    for step in steps:
        expect(f"train/step of step {step}", metrics.get(step, {}).get("train/step"), int(step))
    state = recorded_object(files.state(iteration + 1) / "step.json")
    expect(f"step in {relative(files.state(iteration + 1) / 'step.json', files.project)}", state.get("step"), iteration * files.num_updates)
    updates = updates_of(recorded_object(files.iteration(iteration) / "train" / "hashes.json"))
    for step, update in zip(steps, updates, strict=False):  # an absent one is the evidence's to report
        if "grad_norm_hex" in update and GRADIENT_NORM in metrics.get(step, {}):
            expect(f"grad_norm_hex of step {step}", update["grad_norm_hex"], float_hex(metrics[step][GRADIENT_NORM]))
    return errors


def scalar_rows(files: RunFiles, complete: dict[int, dict[str, np.ndarray]]) -> dict[str, Any]:
    """What the trainer itself counted, step by step, and whether the stored arrays say the same."""
    rows, errors = [], []
    for iteration, arrays in complete.items():
        metrics = recorded_object(files.iteration(iteration) / "train" / "metrics.json", read_metrics)
        own = [_row(int(step), values) for step, values in metrics.items() if NUMEL in values and MISMATCH in values]
        own.sort(key=lambda row: row["step"])
        rows += own
        if len(own) != files.num_updates:
            errors.append(f"i{iteration:04d}: {len(own)} of {files.num_updates} optimizer steps report a mismatch count")
            continue
        counted = {"active tokens": (sum(row["active_token_count"] for row in own), len(arrays["rollout"]))}
        if len(arrays["current"]) == len(arrays["rollout"]):  # unequal sizes have their error already
            mismatches = sum(row["bitwise_mismatch_count"] for row in own), count_unequal(arrays["current"], arrays["rollout"])
            counted["mismatches of current and rollout logprobs"] = mismatches
        for what, (metric, stored) in counted.items():
            if metric != stored:
                errors.append(f"i{iteration:04d}: the trainer counted {metric:g} {what}, the stored arrays have {stored}")
    zero = bool(rows) and all(row["bitwise_mismatch_count"] == 0 for row in rows)
    return {
        "bitwise_zero": zero,
        "errors": errors,
        "evidence_source": "train metrics of every optimizer step, counts over all active response tokens",
        "passed": not errors and (zero or files.num_updates > 1),  # later steps of an iteration train on another policy's tokens
        "rows": rows,
        "total_active_token_exposure": sum(row["active_token_count"] for row in rows),
    }


def _row(step: int, metrics: dict[str, Any]) -> dict[str, Any]:
    samples = metrics.get("train/global_batch_size") or 1
    return {
        "active_token_count": metrics[NUMEL],
        "bitwise_mismatch_count": metrics[MISMATCH],
        "max_abs_dlogp": metrics.get(MAX_ABS_DIFF),
        "mean_abs_dlogp": metrics.get(ABS_DIFF),
        "step": step,
        "vime_mean_active_tokens_per_sample": metrics[NUMEL] / samples,  # the published report's names, its trainer's name included
        "vime_mean_mismatch_count_per_sample": metrics[MISMATCH] / samples,
    }


def compare_sidecars(cfg: Any, files: RunFiles, complete: dict[int, dict[str, np.ndarray]]) -> SidecarComparison:
    mesh = stage_mesh(cfg.layout, "train")
    sidecars = SidecarComparison(mesh, files.num_updates)
    for iteration, arrays in complete.items():
        num_samples = len(arrays["lengths"])
        calls = files.num_updates * count_micro_batches(cfg.layout, num_samples // files.num_updates)
        place = f"i{iteration:04d}/sidecars"
        if len({len(arrays[name]) for name in ("rollout", "old", "current")}) == 1:  # unequal sizes have their error already
            sidecars.read(files.iteration(iteration) / "sidecars", place, calls, arrays, num_samples)
    return sidecars

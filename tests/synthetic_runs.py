"""Run folders as the stages leave them, made in milliseconds: tiny arrays, but every file, every hash and every rank."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from pipeline.config import Checkpoint, Config, Data, Kernels, Layout, Objective, Sampling, experiment_digest
from pipeline.digest import hash_safetensors, sha256_file, sha256_folder, sha256_json, sha256_tensor, tensors_digest, write_json
from pipeline.evidence.chain import RunFiles
from pipeline.evidence.readbacks import BACKEND_IDS, STAGES, expected_counts, expected_implementation
from pipeline.layout import micro_batches, owned_samples, stage_mesh
from pipeline.paths import Paths
from stages import validate

LAYERS, VOCAB = 2, 17
LAYOUTS = {"tp1cp1dp1": Layout(), "tp2": Layout(tp=2, micro_batch=2), "cp2dp2": Layout(cp=2, dp=2, zero=3, packing=False)}
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, 4),
    "model.layers.0.mlp.gate_proj.weight": (6, 4),
    "model.layers.0.mlp.up_proj.weight": (6, 4),
    "model.norm.weight": (4,),
}


@dataclass
class Synthetic:
    """An experiment on disk: one configuration per run key."""

    paths: Paths
    configs: dict[str, Config] = field(default_factory=dict)

    def files(self, key: str) -> RunFiles:
        return RunFiles.of(self.configs[key], key, self.paths)

    @property
    def digest(self) -> str:
        return experiment_digest(next(iter(self.configs.values())))


def make_experiment(
    root: Path, layouts: dict[str, Layout] | None = None, iterations: int = 2, case: str = "R/R", num_updates: int = 1
) -> Synthetic:
    """The same results under every layout; only sidecars, readbacks and logs follow it."""
    synthetic = Synthetic(Paths(root))
    for name, layout in (layouts or LAYOUTS).items():
        cfg = Config(
            name="tiny",
            checkpoint=Checkpoint(name="tiny", source="seeded"),
            data=Data(name="arithmetic", source="arithmetic", num_prompts=4),
            sampling=Sampling(prompts_per_iteration=2, samples_per_prompt=2, max_new_tokens=5),
            objective=Objective(num_updates=num_updates),
            kernels=Kernels(case=case),
            iterations=iterations,
            layout=layout,
        )
        synthetic.configs[f"tiny-{name}"] = cfg
        write_run(synthetic.files(f"tiny-{name}"), cfg)
    return synthetic


def write_run(files: RunFiles, cfg: Config) -> None:
    folder = files.checkpoint_folder
    write_json(folder / "config.json", model_config())
    save_tensors(folder, {"model": parameters(0)}, prefixed=False)
    for iteration in range(1, files.iterations + 1):
        arrays = write_rollout(files, iteration)
        write_train(files, iteration, arrays)
        write_sidecars(files, cfg, iteration)
        write_readbacks(files, cfg, iteration)
        write_logs(files, iteration)


def model_config() -> dict[str, Any]:
    return {
        "hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2, "num_hidden_layers": LAYERS, "num_key_value_heads": 1,
        "vocab_size": VOCAB,
    }  # fmt: skip


def parameters(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, path, {"format": "pt"})


def save_tensors(folder: Path, files: dict[str, dict[str, np.ndarray]], prefixed: bool) -> dict[str, dict[str, str]]:
    """Tensor files and the tensors.json that holds their hashes; Adam's two files share one, under exp_avg/ and exp_avg_sq/."""
    hashes = {}
    for name, arrays in files.items():
        save(folder / f"{name}.safetensors", arrays)
        hashes[name] = hash_safetensors(folder / f"{name}.safetensors")
    flat = {f"{file}/{name}" if prefixed else name: sha for file, own in hashes.items() for name, sha in own.items()}
    write_json(folder / "tensors.json", {"sha256": flat, "digest": tensors_digest(flat)})
    return hashes


def write_rollout(files: RunFiles, iteration: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(100 + iteration)
    responses = np.array([3, 5, 1, 4], dtype=np.int32)
    prompts = np.array([2, 2, 3, 3], dtype=np.int32)
    arrays = {
        "tokens": random.integers(0, VOCAB, int((prompts + responses).sum())).astype(np.int32),
        "lengths": prompts + responses,
        "prompt_lengths": prompts,
        "prompt_ids": np.array([0, 0, 1, 1], dtype=np.int32) + 2 * (iteration - 1),
        "sample_index": np.array([0, 1, 0, 1], dtype=np.int32),
        "logprobs": -random.random(int(responses.sum()), dtype=np.float32),
        "rewards": np.array([1, 0, 0, 1], dtype=np.float32),
        "finish": np.array([0, 1, 0, 0], dtype=np.int32),
    }
    arrays["logprobs"][2] = 0.0  # a certain token: here +0 and -0 could be mixed up
    folder = files.iteration(iteration) / "rollout"
    save(folder / "completions.safetensors", arrays)
    rows = [{"prompt": f"{i}+1=", "completion": f"{i + 1} <b>", "reward": float(r)} for i, r in enumerate(arrays["rewards"])]
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "metrics": {"rollout/reward_mean": 0.5, "rollout/response_length_mean": 3.25},
        "sample_count": len(responses),
        "token_count": len(arrays["tokens"]),
        "completions_sha256": sha256_file(folder / "completions.jsonl"),
        "sha256": {name: sha256_tensor(array) for name, array in arrays.items()},
        "tokens_sha256": tensors_digest({name: sha256_tensor(arrays[name]) for name in ("tokens", "lengths", "prompt_lengths")}),
        "weight_version": f"weight_v{iteration:06d}",
    }
    write_json(folder / "summary.json", summary | {"digest": sha256_json(summary)})
    reference = {"logprobs": arrays["logprobs"] - np.float32(0.125)}
    save_tensors(files.iteration(iteration) / "ref_logprob", {"ref": reference}, prefixed=False)
    return arrays


def write_train(files: RunFiles, iteration: int, rollout: dict[str, np.ndarray]) -> None:
    folder = files.iteration(iteration) / "train"
    advantages = np.array([1, -1, -1, 1], dtype=np.float32).repeat(rollout["lengths"] - rollout["prompt_lengths"])  # one per token
    logprobs = {"old": rollout["logprobs"], "current": rollout["logprobs"], "entropy": -rollout["logprobs"], "advantages": advantages}
    save(folder / "logprobs.safetensors", logprobs)
    metrics, updates = {}, []
    for step in files.steps(iteration):
        norm, kl = float(np.float32(0.1) * np.float32(step + 1)), float(np.float32(0.3) * np.float32(step + 1))
        metrics[str(step)] = {
            "train/loss": float(np.float32(np.float64(np.float32(0.01)) * kl)),
            "train/pg_loss": 0.0,
            "train/kl_loss": kl,
            "train/entropy_loss": 0.5,
            "train/ppo_kl": 0.0,
            "train/ois": 1.0,
            "train/tis": 1.0,
            "train/grad_norm": norm,
            "train/global_batch_size": len(rollout["lengths"]) // files.num_updates,
            "train/step": step,
            "train/train_rollout_logprob_abs_diff": 0.0,
            "train/train_current_rollout_logprob_mismatch_count": 0.0,
            "train/train_current_rollout_logprob_max_abs_diff": 0.0,
            "train/train_current_rollout_logprob_numel": len(rollout["logprobs"]) / files.num_updates,
        }
        updates.append({"gradients": {name: sha256_tensor(a) for name, a in parameters(1000 + step).items()}, "grad_norm_hex": norm.hex()})
    write_json(folder / "metrics.json", metrics)
    version = iteration + 1
    state = {"exp_avg": parameters(2000 + version), "exp_avg_sq": parameters(3000 + version)}
    for moment in state.values():
        moment["model.embed_tokens.weight"][3] = 0.0  # a token that never came up
    save_tensors(files.state(version), state, prefixed=True)
    write_json(files.state(version) / "step.json", {"step": iteration * files.num_updates})
    write_json(files.weights(version) / "config.json", model_config())
    save_tensors(files.weights(version), {"model": parameters(iteration)}, prefixed=False)
    arrays = {name: sha256_tensor(array) for name, array in logprobs.items()}
    hashes = {"updates": updates, "sha256": arrays, "metrics": sha256_file(folder / "metrics.json")}
    write_json(folder / "hashes.json", hashes | {"digest": sha256_json(hashes)})


def write_sidecars(files: RunFiles, cfg: Config, iteration: int) -> None:
    """Context-parallel ranks take turns over the tokens, tensor-parallel ranks hold the same ones."""
    rollout = load_file(files.iteration(iteration) / "rollout" / "completions.safetensors")
    train = load_file(files.iteration(iteration) / "train" / "logprobs.safetensors")
    responses = rollout["lengths"] - rollout["prompt_lengths"]
    ends = np.cumsum(responses)
    mesh, count = stage_mesh(cfg.layout, "train"), len(responses) // files.num_updates
    for rank in range(mesh.world_size):
        _, c, d = mesh.coordinates(rank)
        size = cfg.layout.samples_per_forward
        batches = micro_batches(owned_samples(count, mesh.dp, d), size, count, mesh.dp)
        calls = [[u * count + i for i in batch] for u in range(files.num_updates) for batch in batches]
        for call, batch in enumerate(calls):
            slots = [slot for i in batch for slot in range(ends[i] - responses[i], ends[i]) if slot % mesh.cp == c]
            at = np.array(slots, dtype=np.int64)
            arrays = {"rollout": rollout["logprobs"][at], "old": train["old"][at], "current": train["current"][at]}
            path = files.iteration(iteration) / "sidecars" / f"rank{rank:05d}.call{call:08d}.safetensors"
            save(path, {"slots": at.astype(np.int32), **arrays})


def write_readbacks(files: RunFiles, cfg: Config, iteration: int) -> None:
    rollout = load_file(files.iteration(iteration) / "rollout" / "completions.safetensors")
    lengths = (rollout["lengths"] - rollout["prompt_lengths"]).tolist()
    for stage, side in STAGES.items():
        mesh = stage_mesh(cfg.layout, stage)
        kind = expected_implementation(cfg.kernels.case, stage)
        for rank, (forwards, backwards) in enumerate(expected_counts(cfg.layout, stage, lengths, files.num_updates)):
            calls = {"attention": LAYERS * forwards, "ffn": LAYERS * forwards, "logp": forwards}
            readback = {
                "counts": {"forwards": forwards, "backwards": backwards},
                "kernel_build": "cpu.avx2",
                "mesh": list(mesh.coordinates(rank)),
                "modules": {m: {"backend_id": BACKEND_IDS[m, kind], "implementation": kind, "call_count": n} for m, n in calls.items()},
                "rank": rank,
                "side": side,
                "versions": {"torch": "2.0"},
                "world_size": mesh.world_size,
            }
            write_json(files.iteration(iteration) / "readbacks" / stage / f"rank{rank:05d}.json", readback)


def write_logs(files: RunFiles, iteration: int) -> None:
    timings = {
        "rollout": {"update_weights_time": 0.5, "rollout_time": 1.5, "wall_time": 2.5},
        "ref_logprob": {"ref_log_probs_time": 0.25},
        "train": {"data_preprocess_time": 0.01, "log_probs_time": 0.25, "actor_train_time": 0.5},
    }
    for stage, own in timings.items():
        output = sha256_folder(files.iteration(iteration) / stage)
        write_json(files.logs(iteration) / f"{stage}.json", {"status": "ok", "timings": own, "output": output})


def edit_json(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    write_json(path, content)


def edit_arrays(path: Path, change) -> None:
    arrays = load_file(path)
    change(arrays)
    save(path, arrays)


def validate_all(synthetic: Synthetic, folder: Path) -> dict[str, Path]:
    """Runs the stage `validate` on every run; {run key: its record}."""
    for key, cfg in synthetic.configs.items():
        validate.run(cfg, key, synthetic.paths, folder / f"{key}.json")
    return {key: folder / f"{key}.json" for key in synthetic.configs}

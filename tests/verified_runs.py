"""Run folders whose numbers follow their definitions, as far as tiny arrays allow: what the verifier recomputes must come out the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from safetensors.numpy import load_file
from synthetic_runs import LAYOUTS, Synthetic, make_experiment, save, write_logs, write_sidecars

from pipeline import registry
from pipeline.config import Config, execution_half
from pipeline.digest import read_json, sha256_file, sha256_json, sha256_tensor, write_json
from pipeline.evidence.chain import RunFiles
from pipeline.evidence.compare import ExperimentId, RunRecord, compare
from pipeline.evidence.performance import executed_or_cached, read_performance
from pipeline.evidence.validation import validate
from pipeline.layout import stage_mesh
from pipeline.records import Rollout, tokens_sha256, write_jsonl
from stages import objectives
from stages.rollout import rollout_metrics

TWO = {name: LAYOUTS[name] for name in ("tp1cp1dp1", "tp2")}
RATE = 1e-3


def make_project(root: Path, layouts: dict[str, Any] | None = None, iterations: int = 2, num_updates: int = 1) -> Synthetic:
    """A project folder with runs, logs, params.yaml and env.json."""
    synthetic = make_experiment(root, layouts or TWO, iterations, num_updates=num_updates)
    for key, cfg in synthetic.configs.items():
        cfg.optimizer.lr = RATE
        files = synthetic.files(key)
        write_tokenizer(files.checkpoint_folder)
        for iteration in range(1, iterations + 1):
            rewrite(files, cfg, iteration)
    write_json(root / "env.json", {"python": "3.11", "machine": "x86_64", "packages": {"torch": "2.0", "gguf": None}, "devices": ["cpu"]})
    runs = [registry.Run(key, "tiny", cfg, [f"layout={key}"]) for key, cfg in synthetic.configs.items()]
    content = registry.build(runs, "0" * 64, synthetic.paths)
    (root / "params.yaml").write_text(registry.HEADER + OmegaConf.to_yaml(OmegaConf.create(content)))
    return synthetic


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {f"t{i}": i for i in range(17)}
    (folder / "tokenizer.json").write_text(Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).to_str())


def rewrite(files: RunFiles, cfg: Config, iteration: int) -> None:
    """Rewards, texts, advantages and metrics of an iteration by the functions of the stages."""
    folder = files.iteration(iteration)
    arrays = load_file(folder / "rollout" / "completions.safetensors")
    arrays["rewards"] = np.array([0.625, 0.25, 0.5, 0.5 + iteration / 8], dtype=np.float32)
    ends = np.cumsum(arrays["lengths"])
    for i in (1, 3):  # samples of one prompt start with the same tokens
        length, start, other = arrays["prompt_lengths"][i], ends[i] - arrays["lengths"][i], ends[i - 1] - arrays["lengths"][i - 1]
        arrays["tokens"][start : start + length] = arrays["tokens"][other : other + length]
    save(folder / "rollout" / "completions.safetensors", arrays)
    rollout = Rollout.load(folder / "rollout")
    rows = []
    for i, reward in enumerate(rollout.rewards.tolist()):
        ids = rollout.tokens[ends[i] - rollout.lengths[i] : ends[i]]
        prompt, response = np.split(ids, [rollout.prompt_lengths[i]])
        text, prompt_id = " ".join(f"t{t}" for t in response), int(rollout.prompt_ids[i])
        row = {"prompt": f"t{prompt[0]}", "answer": str(prompt_id), "completion": text, "reward": reward, "num_tokens": len(response)}
        reason = ("eos", "length")[rollout.finish[i]]
        rows.append({**row, "prompt_id": prompt_id, "sample": int(rollout.sample_index[i]), "finish_reason": reason})
    write_jsonl(folder / "rollout" / "completions.jsonl", rows)
    summary = read_json(folder / "rollout" / "summary.json")
    summary |= {
        "metrics": rollout_metrics(rollout, cfg.sampling.samples_per_prompt),
        "completions_sha256": sha256_file(folder / "rollout" / "completions.jsonl"),
        "tokens_sha256": tokens_sha256(arrays),
        "sha256": {name: sha256_tensor(array) for name, array in arrays.items()},
    }
    write_signed(folder / "rollout" / "summary.json", summary)
    rewrite_training(files, cfg, iteration, rollout)
    write_sidecars(files, cfg, iteration)
    write_logs(files, iteration)


def rewrite_training(files: RunFiles, cfg: Config, iteration: int, rollout: Rollout) -> None:
    folder = files.iteration(iteration)
    reference = load_file(folder / "ref_logprob" / "ref.safetensors")["logprobs"]
    old = torch.from_numpy(rollout.logprobs)
    tokens = objectives.TokenData.of(rollout, reference, cfg)
    count = len(rollout.lengths) // files.num_updates
    current, entropy = old.clone(), -old
    if files.num_updates > 1:  # the second step no longer has the policy that sampled
        current[tokens.samples >= count] -= 0.25
    arrays = {"old": old, "current": current, "entropy": entropy, "advantages": tokens.advantages}
    save(folder / "train" / "logprobs.safetensors", {name: x.numpy() for name, x in arrays.items()})
    metrics, written = {}, read_json(folder / "train" / "metrics.json")
    for i, step in enumerate(files.steps(iteration)):
        own = objectives.metrics(current, entropy, old, tokens, range(i * count, (i + 1) * count), cfg.objective)
        own |= {"train/grad_norm": written[str(step)]["train/grad_norm"], "train/step": float(step)}
        metrics[str(step)] = own | {"train/lr-pg_0": RATE, "train/lr-pg_1": RATE}
    write_json(folder / "train" / "metrics.json", metrics)
    hashes = read_json(folder / "train" / "hashes.json")
    hashes |= {"sha256": {name: sha256_tensor(x) for name, x in arrays.items()}, "metrics": sha256_file(folder / "train" / "metrics.json")}
    write_signed(folder / "train" / "hashes.json", hashes)


def write_signed(path: Path, record: dict[str, Any]) -> None:
    """With the digest of the record itself, as the stages write it."""
    record = {name: value for name, value in record.items() if name != "digest"}
    write_json(path, record | {"digest": sha256_json(record)})


def report_of(synthetic: Synthetic, expected: str | None = None) -> dict[str, Any]:
    """The record as the stage compare makes it, and as it is read back."""
    records = []
    for key, cfg in synthetic.configs.items():
        files = synthetic.files(key)
        lengths = {i: Rollout.load(files.iteration(i) / "rollout").lengths.tolist() for i in range(1, files.iterations + 1)}
        performance = read_performance(files, lengths, stage_mesh(cfg.layout, "train").world_size)
        records.append(RunRecord(files, validate(cfg, files), execution_half(cfg), performance, executed_or_cached(files)))
    environment = read_json(synthetic.paths.environment)
    path = synthetic.paths.comparison("tiny")
    write_json(path, compare(records, ExperimentId("tiny", synthetic.digest, "R/R", expected), environment))
    return read_json(path)

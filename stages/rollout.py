"""Rollout: sample completions of the iteration's prompts with the current weights, and score them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError
from pipeline.layout import owned_samples, stage_mesh
from stages import entry

if TYPE_CHECKING:
    from pipeline.records import Prompt
    from stages.engine import Completion, LockstepEngine, Request
    from stages.mesh import Mesh


def main(job: entry.Job) -> None:
    with job.outputs(job.step.rollout, job.step.readbacks / "rollout") as out:
        job.launch(stage_mesh(job.cfg.layout, "rollout").world_size, folder=str(out[0]), readbacks=str(out[1]))


def rank_main(args: dict[str, Any]) -> dict[str, Any]:
    from stages import ranks
    from stages.weights import read_weights

    job = entry.Job.from_args(args)
    mesh = ranks.start_mesh(stage_mesh(job.cfg.layout, "rollout"), job.cfg.launch.threads, job.cfg.launch.kernel_build)
    started = time.perf_counter()
    engine = build_engine(job, mesh)
    engine.load_weights(read_weights(job.step.weights_in), job.step.version_in)
    loaded = time.perf_counter()
    seconds = sample(job, engine, Path(args["folder"]), Path(args["readbacks"]))
    return {"update_weights_time": loaded - started, "rollout_time": seconds, "peak_memory": ranks.peak_memory()}


def build_engine(job: entry.Job, mesh: Mesh, kind: type[LockstepEngine] | None = None) -> LockstepEngine:
    """Without weights yet. kind: a subclass, to look at what the engine does."""
    from stages import ranks
    from stages.engine import LockstepEngine
    from stages.fetch import stop_token_ids
    from stages.model import implementations

    model = ranks.build_model(job.checkpoint, mesh, job.cfg, implementations(job.cfg.kernels, "rollout"))
    return (kind or LockstepEngine)(model, set(stop_token_ids(job.checkpoint)), job.cfg.layout.rollout.batch_size)


def sample(job: entry.Job, engine: LockstepEngine, folder: Path, readbacks: Path) -> float:
    """Samples the iteration's completions and writes them with the evidence; the seconds that generating took."""
    from stages import ranks
    from stages.engine import Request

    cfg, model, mesh = job.cfg, engine.model, engine.model.par.mesh
    started = time.perf_counter()
    model.reset_counts()
    prompts = job.prompts()
    requests = [Request(p.prompt_id, k, p.token_ids) for p in prompts for k in range(cfg.sampling.samples_per_prompt)]
    check_room(max(len(r.token_ids) for r in requests), cfg.sampling.max_new_tokens, model.config.max_positions)
    own = owned_samples(len(requests), mesh.shape.dp, mesh.d)
    completions = engine.generate(requests[own.start : own.stop], cfg.sampling, cfg.seed, job.step.iteration)
    seconds = time.perf_counter() - started
    ranks.write_readback(readbacks, model, mesh, "rollout", {"forwards": engine.forwards, "backwards": 0})
    completions = ranks.gather_objects(mesh, completions)
    if mesh.rank == 0:
        write_rollout(job, prompts, requests, completions, folder)
    return seconds


def check_room(longest_prompt: int, max_new_tokens: int, max_positions: int) -> None:
    """Raises UserError when the longest prompt and its response have more tokens than the model has positions."""
    if longest_prompt + max_new_tokens > max_positions:
        raise UserError(
            f"sampling.max_new_tokens={max_new_tokens}: with a prompt of {longest_prompt} tokens more than "
            f"max_position_embeddings={max_positions}; use {max(0, max_positions - longest_prompt)} or fewer, or shorter prompts"
        )


def write_rollout(job: entry.Job, asked: list[Prompt], requests: list[Request], completions: list[Completion], folder: Path) -> None:
    """The arrays for the trainer, the text for people, and the summary for the comparison."""
    import numpy as np
    from transformers import AutoTokenizer

    from pipeline.digest import sha256_file, sha256_json, sha256_tensor, write_json
    from pipeline.records import Rollout, tokens_sha256, write_jsonl
    from stages.rewards import reward

    tokenizer = AutoTokenizer.from_pretrained(job.checkpoint)
    prompts = {p.prompt_id: p for p in asked}
    texts = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
    rewards = [reward(job.cfg.data.reward, t, c.token_ids, prompts[r.prompt_id].answer) for r, c, t in zip(requests, completions, texts)]

    def int32(values) -> np.ndarray:
        return np.array(list(values), dtype=np.int32)

    rollout = Rollout(
        tokens=int32(token for r, c in zip(requests, completions) for token in (*r.token_ids, *c.token_ids)),
        lengths=int32(len(r.token_ids) + len(c.token_ids) for r, c in zip(requests, completions)),
        prompt_lengths=int32(len(r.token_ids) for r in requests),
        prompt_ids=int32(r.prompt_id for r in requests),
        sample_index=int32(r.sample for r in requests),
        logprobs=np.array([x for c in completions for x in c.logprobs], dtype=np.float32),
        rewards=np.array(rewards, dtype=np.float32),
        finish=int32(c.finish for c in completions),
    )
    rollout.save(folder)
    rows = zip(requests, completions, texts, rollout.rewards.tolist())
    write_jsonl(folder / "completions.jsonl", [text_row(prompts[r.prompt_id], r, c, text, score) for r, c, text, score in rows])
    summary = {
        "sha256": {name: sha256_tensor(array) for name, array in vars(rollout).items()},
        "tokens_sha256": tokens_sha256(vars(rollout)),
        "completions_sha256": sha256_file(folder / "completions.jsonl"),
        "sample_count": len(requests),
        "token_count": int(rollout.lengths.sum()),
        "weight_version": job.step.version_in,
        "metrics": rollout_metrics(rollout, job.cfg.sampling.samples_per_prompt),
    }
    write_json(folder / "summary.json", {**summary, "digest": sha256_json(summary)})


def text_row(prompt: Prompt, request: Request, completion: Completion, text: str, score: float) -> dict[str, Any]:
    """A line of completions.jsonl: one sample, for people."""
    return {
        "prompt_id": request.prompt_id,
        "sample": request.sample,
        "prompt": prompt.prompt,
        "answer": prompt.answer,
        "completion": text,
        "reward": score,
        "num_tokens": len(completion.token_ids),
        "finish_reason": ("eos", "length")[completion.finish],
    }


def rollout_metrics(rollout, samples_per_prompt: int) -> dict[str, float]:
    """The rollout/* metrics; sums by math.fsum, so no order decides a bit."""
    import math

    rewards = [float(r) for r in rollout.rewards]
    n = len(rewards)
    groups = [rewards[i : i + samples_per_prompt] for i in range(0, n, samples_per_prompt)]
    mean = math.fsum(rewards) / n
    deviations = [r - mean for r in rewards]
    return {
        "rollout/reward_mean": mean,
        "rollout/reward_std": math.sqrt(math.fsum(d * d for d in deviations) / n),  # not d**2: pow differs between machines
        "rollout/frac_zero_std": sum(len(set(g)) == 1 for g in groups) / len(groups),
        "rollout/response_length_mean": int(rollout.response_lengths.sum()) / n,
        "rollout/truncated_frac": int((rollout.finish == 1).sum()) / n,
    }


if __name__ == "__main__":
    entry.run(main, "rollout")

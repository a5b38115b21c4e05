"""python -m stages.bench [step] [rollout] [generate] [--threads 1,2] [--rounds 3] [--out FILE]: what a whole step costs, on real weights.

step      one optimizer step of SmolLM2-135M over 16 samples of 68 tokens: our kernels (R/R) against PyTorch's own (P/P)
rollout   new weights and 16 samples of 40 tokens: R/R against P/P
generate  tokens per second of our engine against transformers' `generate` for 1, 8 and 32 sequences: same prompts and lengths

The two sides live in processes of their own and take turns, so what disturbs the machine disturbs both.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kernels.bench.timing import set_threads
from pipeline.compose import compose_run, composing
from pipeline.config import Config, Sampling
from pipeline.layout import MeshShape
from pipeline.paths import ROOT

PROMPT, SAMPLES, NEW_TOKENS = 28, 16, 40
SEQUENCES = {1: 1.1, 8: 1.3, 32: 1.6}  # concurrent sequences: how many times as many tokens per second we want
Thunk = Callable[[], Any]


def checkpoint(cfg: Config) -> Path:
    """SmolLM2 in Hugging Face layout: the fetch stage's folder, or a copy of our own."""
    from stages.fetch import fetch

    for folder in (ROOT / "runs/checkpoints" / cfg.checkpoint.name, ROOT / "runs/bench" / cfg.checkpoint.name):
        if (folder / "tensors.json").exists():
            return folder
    fetch(cfg.checkpoint, folder)
    return folder


def prompt(i: int) -> list[int]:
    return [1, *(1000 + (37 * i + 101 * j) % 40000 for j in range(PROMPT - 1))]


def step(cfg: Config, folder: Path) -> Thunk:
    """One optimizer step; its old logprobs are computed once, before."""
    import torch

    from stages import objectives, ranks, train
    from stages.batch import Sample
    from stages.mesh import Mesh
    from stages.model import implementations
    from stages.trainer import Trainer
    from stages.weights import load_slices, read_weights

    mesh = Mesh(MeshShape(1, 1, 1), 0)
    responses = [[1000 + (53 * i + 211 * j) % 40000 for j in range(NEW_TOKENS)] for i in range(SAMPLES)]
    samples = [Sample(i, torch.tensor([*prompt(i), *r]), PROMPT, i * NEW_TOKENS) for i, r in enumerate(responses)]
    model = ranks.build_model(folder, mesh, cfg, implementations(cfg.kernels, "training"), trained=True)
    load_slices(model, read_weights(folder))
    trainer = Trainer(model, cfg.optimizer, mesh, 0, cfg.numerics, 1000)
    size = SAMPLES * NEW_TOKENS
    column = {name: torch.zeros(size) for name in ("rollout", "reference")}
    tokens = objectives.TokenData(
        **column, advantages=torch.linspace(-1, 1, size), mask=torch.ones(size), counts=torch.full((size,), float(NEW_TOKENS)),
        samples=torch.arange(SAMPLES).repeat_interleave(NEW_TOKENS),
    )  # fmt: skip
    updates = train.plan_updates(samples, cfg, mesh)
    old = train.old_logprobs(trainer, updates, size, cfg, mesh)
    return lambda: train.one_update(trainer, updates[0], tokens, old, cfg, mesh)


def engine(cfg: Config, folder: Path, batch_size: int):
    """A rollout engine that never stops early, and its weights."""
    from stages import ranks
    from stages.engine import LockstepEngine
    from stages.mesh import Mesh
    from stages.model import implementations
    from stages.weights import read_weights

    model = ranks.build_model(folder, Mesh(MeshShape(1, 1, 1), 0), cfg, implementations(cfg.kernels, "rollout"))
    weights = dict(read_weights(folder))
    result = LockstepEngine(model, set(), batch_size)
    result.load_weights(weights.items(), "0")
    return result, weights


def rollout(cfg: Config, folder: Path) -> Thunk:
    from stages.engine import Request

    own, weights = engine(cfg, folder, SAMPLES)
    requests = [Request(i, 0, prompt(i)) for i in range(SAMPLES)]

    def whole() -> None:
        own.load_weights(weights.items(), "0")
        own.generate(requests, Sampling(max_new_tokens=NEW_TOKENS), 0, 0)

    return whole


def generate_ours(cfg: Config, folder: Path, sequences: int) -> Thunk:
    from stages.engine import Request

    own, _ = engine(cfg, folder, sequences)
    requests = [Request(i, 0, prompt(i)) for i in range(sequences)]
    return lambda: own.generate(requests, Sampling(max_new_tokens=NEW_TOKENS), 0, 0)


def generate_transformers(cfg: Config, folder: Path, sequences: int) -> Thunk:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt(i) for i in range(sequences)])
    options = {"do_sample": True, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options)


class Side:
    """A thunk in a process of its own; calling it gives its seconds."""

    def __init__(self, make: Callable[..., Thunk], case: str, threads: int, *args: Any):
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, make, case, threads, args), daemon=True)
        self.process.start()
        other.close()

    def __call__(self) -> float:
        self.pipe.send(True)
        return self.pipe.recv()

    def close(self) -> None:
        self.pipe.send(False)
        self.process.join()


def serve(pipe: Any, make: Callable[..., Thunk], case: str, threads: int, args: tuple) -> None:
    set_threads(threads)
    cfg = configuration(case)
    thunk = make(cfg, checkpoint(cfg), *args)
    thunk()
    while pipe.recv():
        started = time.perf_counter()
        thunk()
        pipe.send(time.perf_counter() - started)


def configuration(case: str) -> Config:
    with composing():
        return compose_run(["experiment=smollm2", f"kernels.case={case}", "layout.micro_batch=0"]).config


def measured(names: list[str], threads: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A record per comparison: seconds of both sides by round, ratio (time, or tokens per second for generate), target."""
    for name in names:
        if name == "generate":
            for n, target in SEQUENCES.items():
                ours, theirs = take_turns(rounds, Side(generate_ours, "R/R", threads, n), Side(generate_transformers, "R/R", threads, n))
                speed = statistics.median(b / a for a, b in zip(ours, theirs))
                yield record(f"generate, {n} sequences", "tokens/s of transformers", threads, ours, theirs, speed, target, speed >= target)
            continue
        make, target = {"step": (step, 1.25), "rollout": (rollout, 1.15)}[name]
        ours, theirs = take_turns(rounds, Side(make, "R/R", threads), Side(make, "P/P", threads))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs))
        yield record(name, "time of P/P", threads, ours, theirs, ratio, target, ratio <= target)


def take_turns(rounds: int, ours: Side, theirs: Side) -> tuple[list[float], list[float]]:
    try:
        pairs = [(ours(), theirs()) for _ in range(rounds)]
    finally:
        for side in (ours, theirs):
            side.close()
    return [a for a, _ in pairs], [b for _, b in pairs]


def record(name: str, unit: str, threads: int, ours: list, theirs: list, ratio: float, target: float, met: bool) -> dict[str, Any]:
    seconds = {"ours": ours, "theirs": theirs}
    return {"name": name, "times": unit, "threads": threads, "ratio": ratio, "target": target, "met": met, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", choices=["step", "rollout", "generate", []], help="default: all three")
    parser.add_argument("--threads", default="1", type=lambda text: [int(t) for t in text.split(",")], help="counts, such as 1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="the figures as JSON")
    args = parser.parse_args()
    checkpoint(configuration("R/R"))  # fetched before two processes want it
    table = Table(title="SmolLM2-135M, fp32: median over rounds of both sides in turn", title_justify="left")
    for column in ("what", "threads", "ours (s)", "theirs (s)", "ratio", "of", "target"):
        table.add_column(column)
    records = []
    names = args.names or ["step", "rollout", "generate"]
    for r in (r for threads in args.threads for r in measured(names, threads, args.rounds)):
        records.append(r)
        seconds = (f"{statistics.median(r['seconds'][side]):.2f}" for side in ("ours", "theirs"))
        target = f"{r['target']:.2f}" + ("" if r["met"] else " MISSED")
        table.add_row(r["name"], str(r["threads"]), *seconds, f"{r['ratio']:.2f}", r["times"], target)
        print(f"{r['name']}: {r['ratio']:.2f}", file=sys.stderr)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if args.out:
        Path(args.out).write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()

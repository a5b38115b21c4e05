"""Checks that a type cannot express, made before anything is written or started. Each message names key, value and remedy."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.config import Config, Layout, Numerics
from pipeline.errors import LayoutError, MissingPrerequisite, UserError
from pipeline.layout import ModelShape, num_leaves, stage_mesh
from pipeline.paths import ROOT
from pipeline.segments import fits, segment_length
from pipeline.source_checks import check_checkpoint, check_data

CASES = ("R/R", "P/P", "P/R", "R/P")
MAX_SEED = 2**63 - 1
CPU_FLAGS = {"avx512": {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx2", "fma"}, "avx2": {"avx2", "fma"}}  # as in kernels.cpu.build


def check(cfg: Config, root: Path = ROOT) -> None:
    """Raises UserError (MissingPrerequisite where something outside the configuration is absent) for the first value that cannot work."""
    _names(cfg)
    _numbers(cfg)
    _choices(cfg)
    check_checkpoint(cfg.checkpoint, root)
    check_data(cfg.data, root)
    _layout(cfg)
    _model(cfg)
    compiler_present(cfg.launch.kernel_build)


def _names(cfg: Config) -> None:
    names = {"name": cfg.name, "checkpoint.name": cfg.checkpoint.name, "data.name": cfg.data.name}
    for key, name in names.items():  # they become folders, stages of DVC and keys in its templates, where a dot would end the key
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise UserError(f"{key}={name!r}: use letters, digits, _ and - only")


def _numbers(cfg: Config) -> None:
    at_least: dict[str, float] = {
        "iterations": 1, "seed": 0, "data.num_prompts": 1, "data.seed": 0, "data.max_digits": 1, "launch.nodes": 1,
        "sampling.prompts_per_iteration": 1, "sampling.samples_per_prompt": 1, "sampling.max_new_tokens": 1, "sampling.top_k": 0,
        "sampling.temperature": 0, "objective.clip_low": 0, "objective.clip_high": 0, "objective.tis_low": 0, "objective.num_updates": 1,
        "optimizer.lr": 0, "optimizer.weight_decay": 0, "optimizer.warmup_steps": 0,
        "numerics.k_leaf": 1, "numerics.vocab_leaf": 1, "numerics.kv_leaf": 1, "numerics.token_leaf": 1, "numerics.grad_scale_log2": 0,
        "layout.tp": 1, "layout.cp": 1, "layout.dp": 1, "layout.micro_batch": 0, "layout.rollout.tp": 1, "layout.rollout.cp": 1,
        "layout.rollout.dp": 1, "layout.rollout.batch_size": 1, "launch.threads": 1, "launch.idle_seconds": 1, "launch.timeout_seconds": 1,
        "launch.segment": 0, "checkpoint.seed": 0,
    }  # fmt: skip
    for key, least in at_least.items():
        value = _get(cfg, key)
        if value is not None and not (math.isfinite(value) and value >= least):
            raise UserError(f"{key}={value}: must be {least} or more")
    for key in ("seed", "data.seed", "checkpoint.seed"):
        if (_get(cfg, key) or 0) > MAX_SEED:
            raise UserError(f"{key}={_get(cfg, key)}: must be below 2**63")
    for key in ("optimizer.eps", "optimizer.max_grad_norm"):
        if not (math.isfinite(_get(cfg, key)) and _get(cfg, key) > 0):
            raise UserError(f"{key}={_get(cfg, key)}: must be above 0")
    if not 0 < cfg.sampling.top_p <= 1:
        raise UserError(f"sampling.top_p={cfg.sampling.top_p}: must be above 0 and at most 1 (1 = off)")
    if cfg.layout.zero not in range(4):
        raise UserError(f"layout.zero={cfg.layout.zero}: must be a ZeRO stage, 0 to 3")
    if cfg.numerics.grad_scale_log2 > 60:
        raise UserError(f"numerics.grad_scale_log2={cfg.numerics.grad_scale_log2}: must be 60 or less, or any gradient overflows 64 bits")
    if len(cfg.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.optimizer.betas):
        raise UserError(f"optimizer.betas={cfg.optimizer.betas}: must be two numbers, each 0 or more and below 1")
    dual, low, high = cfg.objective.dual_clip, cfg.objective.tis_low, cfg.objective.tis_high
    if dual is not None and not dual > 1:
        raise UserError(f"objective.dual_clip={dual}: must be above 1 (null = off)")
    if low > high:
        raise UserError(f"objective.tis_low={low}: must not be above objective.tis_high={high}")
    if cfg.data.max_digits > 9:
        raise UserError(f"data.max_digits={cfg.data.max_digits}: must be 9 or less")
    prompts, updates = cfg.sampling.prompts_per_iteration, cfg.objective.num_updates
    if prompts % updates:
        raise UserError(
            f"objective.num_updates={updates}: must divide sampling.prompts_per_iteration={prompts}; use {_or(_divisors(prompts))}"
        )


def _choices(cfg: Config) -> None:
    choices = {
        "kernels.case": CASES,
        **{f"kernels.{module}": (None, *CASES) for module in ("attention", "ffn", "logp")},
        "checkpoint.source": ("seeded", "local", "hub", "modelscope", "gguf"),
        "data.source": ("arithmetic", "jsonl", "datasets"),
        "data.style": ("terse", "words"),
        "data.reward": ("exact", "math_verify", "dense"),
        "objective.name": ("grpo",),
        "objective.kl_type": ("k1", "k2", "k3"),
        "numerics.precision": ("fp32", "bf16"),
        "optimizer.schedule": ("constant", "linear", "cosine"),
        "verify": ("cached", "fresh"),
        "launch.launcher": ("fork", "torchrun", "deepspeed"),
        "launch.kernel_build": ("auto", "avx512", "avx2", "scalar"),
    }
    for key, allowed in choices.items():
        if _get(cfg, key) not in allowed:
            raise UserError(f"{key}={_get(cfg, key)}: must be {' | '.join(filter(None, allowed))}")


def _layout(cfg: Config) -> None:
    layout, sampling = cfg.layout, cfg.sampling
    samples = sampling.prompts_per_iteration * sampling.samples_per_prompt
    per_update = samples // cfg.objective.num_updates
    if layout.dp > per_update:
        raise LayoutError(
            f"layout.dp={layout.dp}: more ranks than the {per_update} samples of an update can feed; use {per_update} or fewer"
        )
    rollout_dp = layout.rollout.dp or layout.dp
    if rollout_dp > samples:
        raise LayoutError(
            f"layout.rollout.dp={rollout_dp}: more ranks than the {samples} samples of an iteration can feed; use {samples} or fewer"
        )
    if segment_length(cfg) > 1 and not fits(layout):
        ranks, room = (stage_mesh(layout, stage).world_size for stage in ("rollout", "train"))
        raise LayoutError(
            f"launch.segment={cfg.launch.segment}: its rollout runs in the {room} ranks of training, layout.rollout asks for {ranks}; "
            "use fewer or launch.segment=1"
        )


def _model(cfg: Config) -> None:
    """What a layout and the leaves ask of the model, where its numbers are known before it is fetched."""
    architecture = cfg.checkpoint.architecture
    if architecture is None:
        return
    try:
        shape = ModelShape.from_hf(architecture)
    except KeyError as missing:
        raise UserError(f"checkpoint.architecture.{missing.args[0]}: is missing; copy it from the model's config.json") from None
    for key, value in (("num_attention_heads", shape.num_heads), ("num_key_value_heads", shape.num_kv_heads), ("head_dim", shape.head_dim)):
        if value < 1:
            raise UserError(f"checkpoint.architecture.{key}={value}: must be 1 or more")
    if shape.num_heads % shape.num_kv_heads:
        raise UserError(
            f"checkpoint.architecture.num_key_value_heads={shape.num_kv_heads}: must divide num_attention_heads={shape.num_heads}"
        )
    if shape.head_dim % 2:
        raise UserError(f"checkpoint.architecture.head_dim={shape.head_dim}: must be even, rotary embedding turns pairs")
    check_tp(cfg.layout, shape, cfg.numerics, cfg.checkpoint.name)
    longest = architecture.get("max_position_embeddings")
    if longest is None:
        return
    if cfg.sampling.max_new_tokens >= longest:
        raise UserError(
            f"sampling.max_new_tokens={cfg.sampling.max_new_tokens}: must leave room for a prompt in max_position_embeddings={longest}"
        )
    tiles = num_leaves(longest, cfg.numerics.token_leaf)
    if cfg.layout.cp > tiles:
        raise LayoutError(
            f"layout.cp={cfg.layout.cp}: more ranks than the {tiles} token tiles of numerics.token_leaf={cfg.numerics.token_leaf}"
        )


def check_tp(layout: Layout, shape: ModelShape, numerics: Numerics, checkpoint: str) -> None:
    """Heads are cut whole, feed-forward and vocabulary at leaves. Fetch calls it again when a hub model's numbers were not known before."""
    for key, tp in (("layout.tp", layout.tp), ("layout.rollout.tp", layout.rollout.tp or layout.tp)):
        leaves = min(num_leaves(shape.intermediate, numerics.k_leaf), num_leaves(shape.vocab, numerics.vocab_leaf))
        by_heads = _divisors(math.gcd(shape.num_heads, shape.num_kv_heads))
        allowed = [n for n in by_heads if n <= leaves]
        if tp not in by_heads:
            heads = f"the {shape.num_heads} heads and {shape.num_kv_heads} KV heads of checkpoint {checkpoint}"
            raise LayoutError(f"{key}={tp}: does not divide {heads}; use {_or(allowed)}")
        if tp not in allowed:
            remedy = f"use {_or(allowed)}, or smaller numerics.k_leaf and numerics.vocab_leaf"
            raise LayoutError(f"{key}={tp}: {checkpoint} has only {leaves} leaves to share in feed-forward or vocabulary; {remedy}")


def compiler_present(kernel_build: str = "auto") -> None:
    """What kernels.cpu.build will look for, without importing it (and torch): a C++ compiler, and a processor that runs the build."""
    chosen = os.environ.get("LOCKSTEP_CXX", "")
    if chosen and not _is_command(chosen):
        raise MissingPrerequisite(f"LOCKSTEP_CXX={chosen}: no such program; unset it or name a C++17 compiler")
    if not (chosen or shutil.which("g++") or shutil.which("clang++") or find_spec("ziglang")):
        raise MissingPrerequisite("compiler: no g++, clang++ or ziglang to build the CPU kernels with; install one (`pip install ziglang`)")
    missing = CPU_FLAGS.get(kernel_build, set()) - _cpu_flags()
    if missing:
        raise UserError(f"launch.kernel_build={kernel_build}: this processor lacks {', '.join(sorted(missing))}; use auto")


def _is_command(line: str) -> bool:
    try:
        words = shlex.split(line)
    except ValueError:  # an open quotation
        return False
    return bool(words) and shutil.which(words[0]) is not None


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _get(cfg: Config, key: str) -> Any:
    value: Any = cfg
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def _or(values: list[Any]) -> str:
    return " or ".join([", ".join(map(str, values[:-1])), str(values[-1])] if len(values) > 1 else map(str, values))

"""The typed configuration. Its two base classes are the product's contract:

* `Experiment` decides every bit of the result, and nothing else does.
* `Execution` decides how the work is carried out, and may change no bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, cast

from pipeline.digest import sha256_json

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig

MISSING: Any = "???"  # OmegaConf's mark of a value that has to be given; the classes below need no OmegaConf


# --- experiment: every key here is part of the experiment digest -------------------------------------------------------------
@dataclass
class Checkpoint:
    """Where the initial weights and the tokenizer come from."""

    name: str = MISSING  # folder name under runs/checkpoints/, [A-Za-z0-9_.-]
    source: str = MISSING  # seeded | local | hub | modelscope | gguf
    repo: str | None = None  # hub/modelscope: "owner/name"; gguf: PyPI package; local: folder path
    revision: str | None = None  # hub/modelscope: full commit hash; gguf: package version
    file: str | None = None  # gguf: path of the .gguf file inside the package
    sha256: str | None = None  # of that file (gguf) or of model.safetensors (others); None = not checked
    seed: int | None = None  # seeded: key of the counter-based initialisation
    architecture: dict[str, Any] | None = None  # seeded: the fields of config.json


@dataclass
class Data:
    """The prompts. Their token ids are fixed when they are fetched."""

    name: str = MISSING  # folder name under runs/prompts/ (with the checkpoint's name)
    source: str = MISSING  # arithmetic | jsonl | datasets
    num_prompts: int = MISSING  # prompts in the file; an iteration takes the next `sampling.prompts_per_iteration`, wrapping round
    seed: int = 0  # arithmetic: key of the generator
    style: str = "terse"  # arithmetic: terse ("3+4=") | words ("What is 3 + 4?")
    max_digits: int = 2  # arithmetic: digits of the largest operand, 1..9
    path: str | None = None  # jsonl: file with one object a line; datasets: "owner/name" or a local folder
    prompt_key: str = "prompt"  # jsonl, datasets: the field with the prompt
    answer_key: str = "answer"  # and the one with the reference answer
    answer_after: str | None = None  # the answer is what follows the last such mark in its field; None = all of it
    revision: str | None = None  # datasets: full commit hash
    split: str = "train"
    subset: str | None = None
    system_prompt: str | None = None
    reward: str = "exact"  # exact | math_verify | dense


@dataclass
class Sampling:
    prompts_per_iteration: int = 4
    samples_per_prompt: int = 4  # the group of GRPO
    max_new_tokens: int = 32
    temperature: float = 1.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off


@dataclass
class Objective:
    name: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.01
    kl_type: str = "k3"  # k1 | k2 | k3
    entropy_coef: float = 0.0
    normalize_std: bool = True  # advantages divided by the group's standard deviation
    per_token_loss: bool = False
    tis: bool = False  # truncated importance sampling weight on the policy loss
    tis_low: float = 0.0
    tis_high: float = 2.0
    num_updates: int = 1  # optimizer steps an iteration (the rollout is cut in as many equal mini-batches, by prompt)


@dataclass
class Optimizer:
    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0  # on matrices; norms never decay
    max_grad_norm: float = 1.0
    schedule: str = "constant"  # constant | linear | cosine
    warmup_steps: int = 0


@dataclass
class Numerics:
    """Leaf sizes and scales: they fix the order of every sum, so they belong to the experiment."""

    precision: str = "fp32"  # fp32 | bf16: storage of weights and activations; sums, master weights and logits are fp32 in both
    k_leaf: int = 128  # contraction axis of hidden and feed-forward sums (heads use leaves of head_dim)
    vocab_leaf: int = 1024  # vocabulary axis of logsumexp, entropy and the head's dX
    kv_leaf: int = 128  # keys per attention leaf, by absolute position
    token_leaf: int = 64  # tokens per leaf of weight gradients and of dK, dV, by absolute position in the sample
    grad_scale_log2: int = 40  # fixed-point scale of weight gradients: int64(round(g * 2^scale))


@dataclass
class Kernels:
    case: str = "R/R"  # training/rollout: R = ours, P = PyTorch's own
    attention: str | None = None  # a case of its own for one module, such as P/R; None = `case`
    ffn: str | None = None
    logp: str | None = None

    def of(self, module: str) -> str:
        """The case of a module: attention, ffn or logp."""
        return getattr(self, module) or self.case

    @property
    def case_id(self) -> str:
        """R/R, or R/R+attention=P/R where a module has its own."""
        own = [f"+{module}={case}" for module in ("attention", "ffn", "logp") if (case := self.of(module)) != self.case]
        return self.case + "".join(own)


@dataclass
class Experiment:
    name: str = MISSING
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    data: Data = field(default_factory=Data)
    sampling: Sampling = field(default_factory=Sampling)
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    numerics: Numerics = field(default_factory=Numerics)
    kernels: Kernels = field(default_factory=Kernels)
    iterations: int = 3
    seed: int = 0


# --- execution: none of these keys may change a bit --------------------------------------------------------------------------
@dataclass
class RolloutLayout:
    tp: int | None = None  # None = as in training
    cp: int = 1  # ranks that share the positions of a prompt, and the sequences that are decoded
    dp: int | None = None  # None = as in training
    batch_size: int = 8  # sequences decoded together on one rank


@dataclass
class Layout:
    tp: int = 1
    cp: int = 1
    dp: int = 1
    zero: int = 0  # ZeRO stage 0..3
    micro_batch: int = 4  # samples per forward; 0 = all of the rank's
    packing: bool = True  # False: one sample per forward
    rollout: RolloutLayout = field(default_factory=RolloutLayout)

    @property
    def samples_per_forward(self) -> int:
        """0 = all of the rank's."""
        return self.micro_batch if self.packing else 1


@dataclass
class Launch:
    launcher: str = "fork"  # fork (CPU ranks of one machine) | torchrun | deepspeed
    threads: int = 1  # kernel threads per rank
    kernel_build: str = "auto"  # auto | avx512 | avx2 | scalar (slow: for certification)
    idle_seconds: int = 120  # the fork server goes away after so long without work
    timeout_seconds: int = 3600  # of one stage
    segment: int = 0  # iterations that one process covers; 1 = a stage each; 0 = 1 below 30 iterations, then 25 (pipeline/segments.py)
    nodes: int = 1  # torchrun: the same command runs on each of them
    rendezvous: str | None = None  # torchrun with several nodes: host:port, the same on all
    hostfile: str | None = None  # deepspeed with several nodes: lines `host slots=N`


@dataclass
class Tracking:
    enabled: bool = True
    uri: str | None = None  # None: MLFLOW_TRACKING_URI, else sqlite in the project folder
    experiment: str = "lockstep"
    strict: bool = False  # True: an unreachable server is an error


@dataclass
class Execution:
    verify: str = "cached"  # fresh: every stage runs again, whatever DVC has in its caches, and the report says so
    layout: Layout = field(default_factory=Layout)
    launch: Launch = field(default_factory=Launch)
    tracking: Tracking = field(default_factory=Tracking)


@dataclass
class Config(Experiment, Execution):
    """The whole configuration; `Experiment` and `Execution` are its two halves."""


# --- the two halves, and conversions -----------------------------------------------------------------------------------------
EXPERIMENT_KEYS = tuple(f.name for f in fields(Experiment))
EXECUTION_KEYS = tuple(f.name for f in fields(Execution))


def to_config(node: DictConfig | ListConfig | Mapping[Any, Any]) -> Config:
    """The typed configuration of composed YAML. Raises omegaconf's errors for an unknown key, a wrong type, a missing value."""
    from omegaconf import OmegaConf

    merged = OmegaConf.merge(OmegaConf.structured(Config), node)
    return cast(Config, OmegaConf.to_object(merged))


def experiment_half(cfg: Config) -> dict[str, Any]:
    """The part that decides every bit of the result, as plain data."""
    return {key: value for key, value in asdict(cfg).items() if key in EXPERIMENT_KEYS}


def execution_half(cfg: Config) -> dict[str, Any]:
    """The part that may change no bit, as plain data."""
    return {key: value for key, value in asdict(cfg).items() if key in EXECUTION_KEYS}


def experiment_digest(cfg: Config) -> str:
    """sha256 over the canonical JSON of the experiment half: equal digests must end in equal results."""
    return sha256_json(experiment_half(cfg))


def flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optimizer.lr": 1e-6, ...}; lists are leaves."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, name + ".") if isinstance(value, Mapping) and value else {name: value}
    return flat


def short_hash(value: Any) -> str:
    """8 hexadecimal digits that tell folders apart; never a claim of equality."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]

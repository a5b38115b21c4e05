"""One on-policy distillation step by phase: a student samples, a teacher scores the samples, the student takes one optimizer step.

    python -m stages.opd_profile --device cuda                      a Qwen3-0.6B-shaped step, 4 prompt and 8 rollout tokens, bf16 storage
    python -m stages.opd_profile --device cuda --check              three tiny steps in fp32: their digest must be the CPU kernels'

Weights are a fixed integer hash, so a digest of the updated weights can be compared between machines and devices. The loss is the
sampled reverse KL of Lu and Thinking Machines ("On-policy distillation", 2025): the advantage of a token is log p_teacher - log p_student.
Prints one JSON object: seconds of every phase (median over the steps), their sum, the loss and the digest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kernels import adamw, reduce
from pipeline.config import Numerics, Sampling
from pipeline.layout import MeshShape
from stages.batch import Sample, pack
from stages.engine import LockstepEngine, Request
from stages.exact_gradients import ExactGradients
from stages.mesh import Mesh
from stages.model import CausalLM, ModelConfig
from stages.parallel import Parallel
from stages.weights import load_slices

SHAPES = {
    "qwen3-0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6,
    },
    "tiny": {
        "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 320, "rope_theta": 1e4,
    },
}  # fmt: skip
LEAVES = {
    "qwen3-0.6b": {"k_leaf": 256, "vocab_leaf": 4748, "kv_leaf": 128, "token_leaf": 64, "grad_scale_log2": 36},
    "tiny": {"k_leaf": 32, "vocab_leaf": 64, "kv_leaf": 16, "token_leaf": 8, "grad_scale_log2": 40},
}
# Digest of `--shape tiny --precision fp32 --steps 2` on any device: the CPU kernels' bits are the rule.
KNOWN_DIGEST = "84453f1d77d3a634458370cb490b469ccd1a38a4b719030863e5b3f6403146c7"
PROMPT, NEW_TOKENS, LR, MAX_GRAD_NORM = (1, 72, 198, 256), 8, 5e-5, 1.0


def build(shape: str, precision: str, device: str, trained: bool) -> CausalLM:
    fixed = {"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "tie_word_embeddings": True}
    config = ModelConfig.from_hf({**fixed, **SHAPES[shape]})
    par = Parallel(Mesh(MeshShape(1, 1, 1), 0), config.shape, Numerics(precision=precision, **LEAVES[shape]))
    with torch.device(device):
        model = CausalLM(config, par, dict.fromkeys(("attention", "ffn", "logp"), "lockstep"))
    cos, sin = model.model.tables
    model.model.tables = cos.to(device), sin.to(device)
    return model if trained else model.to(par.dtype)


def hashed(shape: torch.Size, key: int, device: str) -> Tensor:
    """fp32 numbers in [-1, 1), a hash of key and index (the finalizer of splitmix64): integer arithmetic, the same on every device."""
    x = torch.arange(shape.numel(), device=device) + (key << 40)
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return ((x >> 40).to(torch.float32) * 2.0**-23).view(shape)


def initial_weights(model: CausalLM, device: str, change: float = 0.0) -> Iterator[tuple[str, Tensor]]:
    """(name, fp32 tensor); `change` is the size of the student's perturbation."""
    for key, (name, parameter) in enumerate(sorted(model.named_parameters())):
        if "norm" in name:
            yield name, torch.ones(parameter.shape, device=device)
        else:
            weight = hashed(parameter.shape, 2 * key, device) * parameter.shape[1] ** -0.5
            yield name, weight + hashed(parameter.shape, 2 * key + 1, device) * change if change else weight


class Step:
    """The three models of a step and its phases."""

    def __init__(self, shape: str, precision: str, device: str):
        self.device, self.numerics = device, Numerics(precision=precision, **LEAVES[shape])
        self.teacher = build(shape, precision, device, trained=False)
        self.student = build(shape, precision, device, trained=True)
        load_slices(self.teacher, initial_weights(self.teacher, device))
        load_slices(self.student, initial_weights(self.student, device, change=1e-3))
        graphs = () if device == "cpu" else (1,)
        self.engine = LockstepEngine(build(shape, precision, device, trained=False), set(), 1, graphs)
        self.parameters = dict(self.student.named_parameters())
        shapes = {name: p.shape for name, p in self.parameters.items()}
        self.grads = self.student.par.grads = ExactGradients(shapes, self.numerics.grad_scale_log2, device=device)
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.parameters.items()}
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.loss, self.count = 0.0, 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = self.now()
        yield
        self.seconds[name].append(self.now() - started)

    def now(self) -> float:
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    def run(self) -> None:
        with self.phase("update_weights"):
            self.engine.load_weights(((n, p.detach()) for n, p in self.parameters.items()), str(self.count))
        with self.phase("rollout"):
            done = self.engine.generate([Request(0, 0, list(PROMPT))], Sampling(max_new_tokens=NEW_TOKENS), 0, self.count)
        sample = Sample(0, torch.tensor([*PROMPT, *done[0].token_ids]), len(PROMPT), 0)
        batch = pack([sample], self.numerics.token_leaf).to(self.device)
        with self.phase("teacher_forward"), torch.no_grad():
            teacher = self.teacher(batch, 1.0)[0]
        with self.phase("student_forward"):
            student, _ = self.student(batch, 1.0)
        with self.phase("distillation_loss"):
            gap = student.detach() - teacher
            loss = (student * gap).sum()
            self.loss = float(gap.sum()) / NEW_TOKENS
        with self.phase("backward"):
            loss.backward()
        with self.phase("gradients_and_norm"):
            gradients = {name: self.grads.finish(name, float(NEW_TOKENS)) for name in self.parameters}
            top = reduce.max_exponent(list(gradients.values()))
            norm = reduce.norm_from_limbs(reduce.square_limbs(list(gradients.values()), top), top)
        with self.phase("optimizer_step"):
            self.count += 1
            for name, p in self.parameters.items():
                gradient = gradients[name] if norm <= MAX_GRAD_NORM else gradients[name] * (MAX_GRAD_NORM / norm)
                adamw.step(p.data, gradient, *self.moments[name], LR, 0.9, 0.95, 1e-8, 0.0, self.count)

    def digest(self) -> str:
        """sha256 over the student's fp32 weights, in name order."""
        total = hashlib.sha256()
        for _, p in sorted(self.parameters.items()):
            total.update(p.detach().cpu().numpy().tobytes())
        return total.hexdigest()


def profile(shape: str, precision: str, device: str, steps: int, say: Callable[[str], None]) -> dict:
    """One step to warm up, then `steps` measured ones."""
    step = Step(shape, precision, device)
    step.run()
    step.seconds.clear()
    for i in range(steps):
        step.run()
        say(f"step {i + 1} of {steps}: loss {step.loss:.3e}")
    seconds = {name: statistics.median(values) for name, values in step.seconds.items()}
    return {
        "shape": shape,
        "precision": precision,
        "device": device,
        "prompt_tokens": len(PROMPT),
        "rollout_tokens": NEW_TOKENS,
        "steps": steps + 1,
        "seconds": seconds,
        "total_seconds": sum(seconds.values()),
        "loss": step.loss,
        "digest": step.digest(),
        "engine": step.engine.describe(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit status 1 when the known digest is not reached")
    args = parser.parse_args()
    if args.check:
        digest = profile("tiny", "fp32", args.device, 2, lambda line: None)["digest"]
        print(f"tiny step, fp32, {args.device}: {digest} {'equals' if digest == KNOWN_DIGEST else 'IS NOT'} the known digest")
        sys.exit(digest != KNOWN_DIGEST)
    result = profile(args.shape, args.precision, args.device, args.steps, lambda line: print(line, file=sys.stderr))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

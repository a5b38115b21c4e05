"""Compiles every kernel for NVIDIA GPUs without having one, and reads what came out: registers, spills, shared memory, instructions.

Each module of `kernels/gpu/` lists representative launches in `compile_cases()`. Run as `python -m kernels.gpu.ahead_of_time [module ...]`,
in a process without TRITON_INTERPRET, which prints one JSON line per case and architecture.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import gpu
from kernels.gpu import math

ARCHITECTURES = (80, 90, 100)
FORBIDDEN = re.compile(r"\b(?:div\.full|div\.approx|sqrt\.approx|rsqrt\.approx|ex2\.approx|lg2\.approx|rcp\.approx)\b|\.ftz\b")
MMA = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma.sync": "mma.sync"}


@dataclass(frozen=True)
class Case:
    """One launch. `signature`: argument name -> Triton type ("*fp32", "i32"), in order, without the constexprs. `aligned`: arguments that
    are multiples of 16, as the launcher finds out by itself. `main`: a kernel that must not spill. `approximate`: the card's own exp2 is
    meant (bf16 attention, whose probabilities are rounded to bf16 next)."""

    kernel: object
    name: str
    signature: dict[str, str]
    constexprs: dict[str, object]
    aligned: tuple[str, ...] = ()
    options: dict[str, object] = field(default_factory=dict)
    main: bool = True
    approximate: bool = False


def cases(modules: list[str]) -> Iterator[tuple[str, Case]]:
    """Cases of the named modules of `kernels/gpu/`, or of all that have some."""
    for name in modules or sorted(m.name for m in pkgutil.iter_modules(gpu.__path__)):
        for case in getattr(importlib.import_module(f"kernels.gpu.{name}"), "compile_cases", list)():
            yield name, case


def source(case: Case) -> ASTSource:
    signature = {name: case.signature.get(name, "constexpr") for name in case.kernel.arg_names}
    attributes = {(case.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    return ASTSource(case.kernel, signature, case.constexprs, attributes)


def compile_case(case: Case, capability: int):
    """The compiled kernel, with `asm` and `metadata`."""
    return triton.compile(source(case), target=GPUTarget("cuda", capability, 32), options={**case.options, **math.LAUNCH})


def row(module: str, case: Case, capability: int) -> dict:
    """What one case became. `fma`, `mul_add`: counts of fp32 instructions; `mma`: classes of matrix instructions found."""
    compiled = compile_case(case, capability)
    ptx = compiled.asm["ptx"]
    return {
        "module": module,
        "kernel": case.kernel.__name__,
        "case": case.name,
        "arch": capability,
        "main": case.main,
        **resources(compiled.asm["cubin"]),
        "shared": compiled.metadata.shared,
        "mma": sorted(name for name, text in MMA.items() if text in ptx),
        "fma": len(re.findall(r"\bfma\.rn\.f32", ptx)),
        "mul_add": len(re.findall(r"\b(?:mul|add|sub)(?:\.rn)?\.f32", ptx)),
        "forbidden": sorted(set(FORBIDDEN.findall(ptx)) - ({"ex2.approx", ".ftz"} if case.approximate else set())),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and spill stores in the machine code of a cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "-sass")
        )
    return {"registers": int(re.search(r"REG:(\d+)", usage)[1]), "spills": len(re.findall(r"\bSTL\b", code))}


def main(arguments: list[str]) -> None:
    archs = [int(a) for a in arguments if a.isdigit()] or ARCHITECTURES
    for module, case in cases([a for a in arguments if not a.isdigit()]):
        for capability in archs:
            print(json.dumps(row(module, case, capability)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

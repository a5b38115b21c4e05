"""Every Triton kernel compiles for NVIDIA GPUs, without one: registers, shared memory, instructions. Not under the interpreter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = 227 * 1024
SLOPPY = """
import triton, triton.language as tl
@triton.jit
def sloppy(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, 1.0 / x + tl.exp(x))
"""


def run(*arguments: str, cwd: str | None = None) -> str:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def table(*arguments: str) -> list[dict]:
    return [json.loads(line) for line in run("-m", "kernels.gpu.ahead_of_time", *arguments).splitlines()]


def faults(row: dict) -> list[str]:
    limits = {
        "forbidden instructions": row["forbidden"],
        "spills": row["main"] and row["spills"] > 8,
        "shared memory": row["shared"] > SHARED,
    }
    return [f"{row['case']} on sm_{row['arch']}: {name}" for name, bad in limits.items() if bad]


def test_exact_sums_compile():
    rows = table("reduce", "90")
    assert len(rows) == 4 and not [fault for row in rows for fault in faults(row)]


def test_approximate_instructions_are_seen(tmp_path):
    (tmp_path / "sloppy.py").write_text(SLOPPY)
    call = "from sloppy import sloppy; from kernels.gpu import ahead_of_time as a; import json; print(json.dumps(a.row('', a.Case(sloppy, 's', {'x_ptr': '*fp32', 'y_ptr': '*fp32'}, {'BLOCK': 128}), 90)))"  # noqa: E501
    row = json.loads(run("-c", call, cwd=str(tmp_path)))
    assert faults(row) == ["s on sm_90: forbidden instructions"] and "div.full" in row["forbidden"]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_all_kernels_compile(arch):
    rows = table(arch)
    assert not [fault for row in rows for fault in faults(row) if arch == "90" or "forbidden" in fault]
    linear = [row for row in rows if row["kernel"] == "product_kernel"]
    classes = {tuple(row["mma"]) for row in linear if row["case"].startswith("bf16")}
    assert len(classes) == 1 and classes != {()}, "every schedule of a product runs one class of matrix instruction"
    assert arch != "90" or classes == {("wgmma",)}
    assert all(row["fma"] and not row["mma"] for row in linear if row["case"].startswith("fp32"))


@pytest.mark.slow
def test_an_fp32_dot_is_a_chain_over_ascending_k():
    """In PTX: every accumulator of a K block is one chain of 32 FMAs, whose operands come from the 32 words of one row in shared memory."""
    call = "from kernels.gpu import linear as l, ahead_of_time as a; print(a.compile_case(next(c for c in l.compile_cases() if c.name == 'fp32 forward decode'), 90).asm['ptx'])"  # noqa: E501
    chains = fma_chains(run("-c", call))
    assert len(chains) == 8 and all(len(chain) == 32 for chain in chains)
    for operand in (0, 1):
        words = [[link[operand] for link in chain] for chain in chains]
        assert all(word == [word[0] + 4 * i for i in range(32)] for word in words)
    assert fma_chains("ld.shared.v2.b32 {%r1, %r2}, [%r9];\nfma.rn.f32 %r4, %r2, %r2, %r3;\nfma.rn.f32 %r5, %r1, %r1, %r4;") == [
        [(4, 4), (0, 0)]
    ], "the control: a descending chain is seen as one"


def fma_chains(ptx: str) -> list[list[tuple[int, int]]]:
    """For every accumulator, the offsets of both operands' words in shared memory, in the order in which FMAs use them."""
    word: dict[str, int] = {}
    chains: dict[str, list[tuple[int, int]]] = {}
    for line in ptx.splitlines():
        registers = re.findall(r"%\w+|\b_\b", line)
        if "ld.shared" in line and (at := re.search(r"\[%\w+(?:\+(\d+))?\]", line)):
            word.update((r, int(at[1] or 0) + 4 * i) for i, r in enumerate(registers[:-1]))
        elif "mov.b64" in line and "{" in line and registers[-1] in word:
            word.update((r, word[registers[-1]] + 4 * i) for i, r in enumerate(registers[:-1]))
        elif "cvt.u32.u64" in line and registers[-1] in word:
            word[registers[0]] = word[registers[-1]]
        elif "fma.rn.f32" in line:
            result, a, b, c = registers
            chains[result] = [*chains.pop(c, []), (word[a], word[b])]
    return list(chains.values())

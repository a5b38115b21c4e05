"""python -m kernels.bench [op ...] [--threads 1,2] [--device cpu|cuda] [--quick] [--seconds N] [--out FILE]

Prints, for every operation, the ratio of our time to PyTorch's own on the same work, beside the target and the floor. Rounds are
interleaved in one process, so the ratio means something on a busy machine; seconds don't. Exit status 0 whatever the figures are.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from kernels.bench import rates
from kernels.bench.shapes import QWEN3_06B, dtypes
from kernels.bench.timing import Clock, Row, geometric_mean, set_threads, time_case

OPS = ("linear", "attention", "logprob", "rms_norm", "swiglu", "rope", "embedding", "adamw")
WHOLE = ("step", "rollout", "generate")  # measured by stages/bench.py, in a process of its own: kernels know no stages


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="op", help=f"{', '.join((*OPS, *WHOLE))} (default: all)")
    parser.add_argument("--threads", default="1,2", type=lambda text: [int(t) for t in text.split(",")])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop timing after so long and print what there is")
    parser.add_argument("--out", help="the figures as JSON")
    args = parser.parse_args(argv)
    if unknown := set(args.ops) - {*OPS, *WHOLE}:
        parser.error(f"{', '.join(sorted(unknown))}: no such op; there are {', '.join((*OPS, *WHOLE))}")
    threads = args.threads if args.device == "cpu" else [1]
    ops = [op for op in OPS if op in (args.ops or OPS)]
    deadline = time.monotonic() + args.seconds
    rows = list(itertools.takewhile(lambda _: time.monotonic() < deadline, measured(ops, args.device, threads, args.quick))) if ops else []
    if time.monotonic() >= deadline:
        print(f"cut after {args.seconds:g} s: not every case was timed")
    memory = peak_memory(args.ops, args.device, args.quick)
    if rows:
        print("ours / PyTorch's own: time ratio over interleaved rounds\n", *table(rows), "\nby op\n", *means(rows), "", sep="\n")
    print(*memory, sep="\n", flush=True)
    whole = [name for name in WHOLE if name in args.ops or not (args.ops or args.quick)]
    wholes = measured_whole(whole, threads) if whole and args.device == "cpu" else []
    if args.out:
        figures = {"device": args.device, "torch": torch.__version__, "rows": [row.record() for row in rows], "memory": memory}
        Path(args.out).write_text(json.dumps({**figures, "whole": wholes}, indent=1) + "\n")


def measured_whole(names: list[str], threads: list[int]) -> list[dict]:
    """Records of stages/bench.py, which prints its own table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "whole.json"
        command = [sys.executable, "-m", "stages.bench", *names, "--threads", ",".join(map(str, threads)), "--out", str(out)]
        subprocess.run(command, check=True)
        return json.loads(out.read_text())


def measured(ops: list[str], device: str, threads: list[int], quick: bool) -> Iterator[Row]:
    """Every case of every op at every thread count, one after the other."""
    clock, limits = Clock(device), {}
    for count in threads:
        set_threads(count)
        limits[count] = {dtype: rates.measure(clock, dtype) for dtype in dtypes(device)}
    for op in ops:
        module = importlib.import_module(f"kernels.bench.{op}")
        print(f"{op} ...", file=sys.stderr)
        for case in module.cases(device, quick):
            for count in threads:
                set_threads(count)
                rate = limits[count][case.dtype or dtypes(device)[0]]
                row = time_case(case, clock, count, 3 if quick else 7)
                row.floor = rate.floor(case.flops, case.bytes)
                yield row
    set_threads(1)


def table(rows: list[Row]) -> list[str]:
    body = []
    for row in rows:
        case = row.case
        floors = [f"{t / row.floor:.1f}" if row.floor else "" for t in (row.ours, row.theirs)]
        figures = [f"{x:.2f}" for x in (min(row.ratios), row.median, max(row.ratios))]
        body.append([case.op, case.shape, case.detail, str(row.threads), *figures, _against(case.target, row.met), *floors])
    return markdown(["op", "model", "case", "threads", "min", "median", "max", "target", "ours/floor", "theirs/floor"], body)


def means(rows: list[Row]) -> list[str]:
    """Per op and thread count: geometric mean of the medians, the largest, the misses."""
    targets = {}
    for op in OPS:
        targets |= getattr(importlib.import_module(f"kernels.bench.{op}"), "MEAN_TARGET", {})
    body = []
    for op, count in dict.fromkeys((row.case.op, row.threads) for row in rows):
        own = [row for row in rows if (row.case.op, row.threads) == (op, count)]
        mean, target = geometric_mean(row.median for row in own), targets.get(op)
        shown = "" if target is None else _against(target, mean <= target)
        worst, missed = max(row.median for row in own), sum(not row.met for row in own)
        body.append([op, str(count), str(len(own)), f"{mean:.2f}", shown, f"{worst:.2f}", f"{missed} of {len(own)}"])
    return markdown(["op", "threads", "cases", "geometric mean", "target", "largest", "missed"], body)


def _against(target: float, met: bool) -> str:
    return f"{target:.2f}" if met else f"{target:.2f} MISSED"


def markdown(head: list[str], body: list[list[str]]) -> list[str]:
    """Lines of a table that reads well as text, too."""
    widths = [max(map(len, column)) for column in zip(head, *body)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in (head, *body)]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def peak_memory(ops: list[str], device: str, quick: bool) -> list[str]:
    """Lines on memory, each measured in a child process."""

    def child(op: str, size: int) -> int:
        command = [sys.executable, "-m", "kernels.bench.memory", op, str(size)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    lines = []
    if device != "cpu":
        return lines
    if not ops or "logprob" in ops:
        rows = 256 if quick else 1024
        used, full = child("logprob", rows), 4 * rows * QWEN3_06B.vocab
        verdict = "met" if used < 0.05 * full else "missed"
        lines.append(
            f"logprob forward, V={QWEN3_06B.vocab} M={rows}: peak {used / full:.1%} of the full logits (target below 5%: {verdict})"
        )
    if not ops or "attention" in ops:
        sizes = (512, 1024, 2048) if quick else (1024, 2048, 4096)
        used = [child("attention", n) for n in sizes]
        growth = (used[2] - used[1]) / max(used[1] - used[0], 1)
        verdict = "met" if growth < 2.6 else "MISSED"  # linear: 2, quadratic: 4
        shown = ", ".join(f"{n}: {u / 2**20:.1f} MiB" for n, u in zip(sizes, used))
        lines.append(f"attention forward and backward, SmolLM2, tokens -> peak memory {shown} (linear: {verdict})")
    return lines


if __name__ == "__main__":
    main()

"""The check for a machine with a GPU: python tests/gpu/run.py, from the repository root, with torch, triton, numpy and pytest alone.

Certificate bit for bit, several ranks on one card, accuracy against fp64, ratios to PyTorch's own operations, one distillation step by
phase. Every section is a process of its own with a time limit (all together six minutes), fails alone, and shows its traceback. Tables go
to stdout; the same as JSON and Markdown for docs/gpu.md to $OUT, else ./gpu-report. Triton's cache and the C++ build stay in the
repository folder. Exit status: 0, 1 when a section failed or was cut, 4 without a GPU. --rehearse runs it all on the CPU, small.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(os.environ.get("OUT") or ROOT / "gpu-report").resolve()
OPS = ("linear", "attention", "logprob", "rms_norm", "swiglu", "rope", "embedding", "adamw", "elementwise", "reduce", "rng")


class Done(NamedTuple):
    """A process that has ended, or was ended when its time was over."""

    status: int | None  # None: cut
    stdout: str
    stderr: str
    seconds: float

    def state(self) -> str:
        return f"CUT after {self.seconds:.0f} s" if self.status is None else "ok" if self.status == 0 else f"FAILED ({self.status})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, without a GPU")
    parser.add_argument("--only", default="", help="comma-separated sections")
    args = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "triton"))
    os.environ["PYTHONPATH"] = str(ROOT)
    OUT.mkdir(parents=True, exist_ok=True)
    device = "cpu" if args.rehearse else "cuda"
    facts = machine(device)
    if device == "cuda" and "card" not in facts:
        print("PyTorch sees no GPU here; --rehearse runs the check on the CPU", file=sys.stderr)
        return 4
    report: dict[str, Any] = {"machine": facts, "sections": {}}
    show("machine", [[key, value] for key, value in facts.items()])
    sections = {"certificate": certificate, "ranks": ranks, "accuracy": accuracy, "bench": bench, "step": step}
    for name, section in sections.items():
        if not args.only or name in args.only.split(","):
            started = time.monotonic()
            try:
                report["sections"][name] = section(device)
            except Exception as fault:  # the others are to run all the same
                report["sections"][name] = {"state": f"FAILED ({type(fault).__name__}: {fault})", "tables": [], "text": ""}
            record = report["sections"][name] | {"seconds": round(time.monotonic() - started, 1)}
            report["sections"][name] = record
            show(f"{name}: {record['state']}, {record['seconds']} s", *record["tables"], text=record["text"])
            write(report)
    return 0 if all(section["state"] == "ok" for section in report["sections"].values()) else 1


def machine(device: str) -> dict[str, str]:
    """Card, driver, date and versions."""
    import torch

    facts = {"date": datetime.date.today().isoformat(), "python": sys.version.split()[0], "torch": torch.__version__}
    facts["triton"] = __import__("triton").__version__ if importlib.util.find_spec("triton") else "missing"
    if device == "cuda" and torch.cuda.is_available():
        facts["card"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        facts["cuda"] = str(torch.version.cuda)
        try:
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            facts["driver"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")[0]
        except (OSError, subprocess.TimeoutExpired):
            facts["driver"] = "unknown"
    return facts


# --- sections ----------------------------------------------------------------------------------------------------------------
def certificate(device: str) -> dict[str, Any]:
    """Operations at the same time, each in its own process: what breaks one card context breaks no other operation's."""
    limit, quick = 110.0, ["--quick"] if device == "cpu" else []
    width = 3 if device == "cpu" else len(OPS)
    waiting = [[*python("-m", "kernels.certify", op, "--device", device, "--keep-going", "--seconds", "95"), *quick] for op in OPS]
    ended: list[Done] = []
    started = time.monotonic()
    while waiting:
        now, waiting = waiting[:width], waiting[width:]
        commands = [[*command, "--out", str(OUT / f"certificate_{command[3]}.json")] for command in now]
        ended += run(commands, limit - (time.monotonic() - started))
    return certificates(OPS, ended)


def ranks(device: str) -> dict[str, Any]:
    """Collectives and a tensor-parallel linear layer: gloo ranks that share the card, NCCL where each has its own."""
    options = ["--device", device, "--keep-going", "--out", str(OUT / "certificate_collectives.json")]
    return certificates(("collectives",), run([python("-m", "kernels.certify", "collectives", *options)], 60))


def accuracy(device: str) -> dict[str, Any]:
    path = OUT / "accuracy.json"
    (done,) = run([python("tests/gpu/accuracy.py", "--device", device, "--out", str(path))], 50)
    rows = json.loads(path.read_text()) if path.exists() else []
    return section(done, [[["op", "dtype", "error", "PyTorch's error", "verdict"], *rows]])


def bench(device: str) -> dict[str, Any]:
    """Ratios to PyTorch's own operations."""
    if not (ROOT / "kernels/bench").exists():
        return {"state": "FAILED (not available: kernels.bench)", "tables": [], "text": ""}
    options = ["--quick", "--threads", "1", "swiglu"] if device == "cpu" else ["--seconds", "85"]
    (done,) = run([python("-m", "kernels.bench", "--device", device, "--out", str(OUT / "bench.json"), *options)], 100)
    return section(done, [], done.stdout)


def step(device: str) -> dict[str, Any]:
    """A tiny distillation step in fp32, whose weights must have the digest of the CPU kernels; then a Qwen3-0.6B-shaped one by phase."""
    if not (ROOT / "stages/opd_profile.py").exists():
        return {"state": "FAILED (not available: stages.opd_profile)", "tables": [], "text": ""}
    (known,) = run([python("-m", "stages.opd_profile", "--device", device, "--check")], 30)
    if known.status != 0 or device == "cpu":
        return section(known, [], known.stdout)
    (done,) = run([python("-m", "stages.opd_profile", "--device", device)], 60)
    (OUT / "step.json").write_text(done.stdout)
    return section(done, [], known.stdout + done.stdout)


# --- processes ---------------------------------------------------------------------------------------------------------------
def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def run(commands: list[list[str]], limit: float) -> list[Done]:
    """Runs the commands side by side; what still runs after `limit` seconds is ended with all its children."""
    started, running = time.monotonic(), []
    for i, command in enumerate(commands):
        files = [(OUT / f".{kind}{i}").open("w+") for kind in ("stdout", "stderr")]
        running.append((subprocess.Popen(command, cwd=ROOT, stdout=files[0], stderr=files[1], start_new_session=True), files))
    ended = []
    for process, files in running:
        try:
            status: int | None = process.wait(max(1.0, limit - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read())
            file.close()
            Path(file.name).unlink()
        ended.append(Done(status, *texts, time.monotonic() - started))
    return ended


def section(done: Done, tables: list[list[list[Any]]], text: str = "") -> dict[str, Any]:
    """A section's record; with its last lines of stderr unless it ended well."""
    return {"state": done.state(), "tables": tables, "text": text if done.status == 0 else f"{text}\n{tail(done.stderr)}"}


def certificates(ops: tuple[str, ...], ended: list[Done]) -> dict[str, Any]:
    rows: list[list[Any]] = [["op", "dtype", "cases", "elements", "verdict", "sha256 of the rule's results"]]
    faults, text = [], []
    for op, done in zip(ops, ended, strict=False):
        path = OUT / f"certificate_{op}.json"
        record = json.loads(path.read_text()) if path.exists() else {"ops": {}, "faults": [], "verdict": done.state()}
        bad = {fault["dtype"] for fault in record["faults"]}
        for dtype, kinds in record["ops"].get(op, {}).items():
            tallies = [kind for kind in kinds.values() if isinstance(kind, dict)]
            verdict = "DIFFERENT" if dtype in bad else "CUT" if "cut" in kinds else "certified"
            digest = kinds["rule"]["sha256"][:16] if "rule" in kinds else "-"
            rows.append([op, dtype, sum(t["cases"] for t in tallies), sum(t["elements"] for t in tallies), verdict, digest])
        faults += [" ".join(f"{key}: {value};" for key, value in fault.items()) for fault in record["faults"]]
        if done.status is None or (done.status and not record["faults"]):
            rows.append([op, "", "", "", done.state(), ""])
            text.append(f"{op}:\n{tail(done.stderr)}")
    good = len(ended) == len(ops) and all(done.status == 0 for done in ended)
    return {"state": "ok" if good else "FAILED", "tables": [rows], "text": "\n".join([*faults, *text])}


def tail(text: str) -> str:
    return "\n".join(text.splitlines()[-30:])


# --- report ------------------------------------------------------------------------------------------------------------------
def show(title: str, *tables: list[list[Any]], text: str = "") -> None:
    print(f"\n== {title}")
    for table in tables:
        widths = [max(len(str(row[i])) for row in table) for i in range(len(table[0]))]
        for row in table:
            print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip())
    if text.strip():
        print(text.rstrip())
    sys.stdout.flush()


def write(report: dict[str, Any]) -> None:
    """Both files, after every section: a check that is cut leaves what it has."""
    (OUT / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    facts = report["machine"]
    lines = [f"## {facts.get('card', 'CPU (rehearsal)')}, {facts['date']}", "", *(f"* {key}: {value}" for key, value in facts.items()), ""]
    for name, record in report["sections"].items():
        lines += [f"### {name}: {record['state']}, {record['seconds']} s", ""]
        for header, *rows in record["tables"]:
            lines += [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(map(str, row))} |" for row in rows), ""]
        if record["text"].strip():
            lines += ["```", record["text"].strip("\n"), "```", ""]
    (OUT / "report.md").write_text("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())

"""python -m kernels.certify [op ...] [--device cpu|cuda|interpreter] [--quick] [--keep-going] [--seconds N] [--out FILE]

Prints the certificate as JSON. Exit status: 0 when every bit is as the rule says, 1 at the first that is not (op, case, element and both
values are named), 2 for a bad argument, 4 where the kernels cannot be built. What is not available, or not reached in time, is no success.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from kernels.certify.core import Case, Difference, certify
from kernels.certify.setting import THREADS, NotAvailable, Setting
from kernels.cpu import build

OPS = (
    "linear", "attention", "logprob", "rms_norm", "swiglu", "rope", "embedding", "adamw", "elementwise", "reduce", "rng", "collectives",
)  # fmt: skip
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
MAX_FAULTS = 5  # of one operation and dtype, when told to keep going
CLASSES = {
    "cpu": "fp32 sums by the rule; bf16 is storage, rounded once",
    "interpreter": "Triton kernels on CPU tensors, against the C++ kernels",
    "cuda": "fp32 by the rule of the CPU; bf16 products on tensor cores: a class of its own, certified among all schedules and splits",
}


class Stop(Exception):
    """The first fault, where faults are not collected."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.certify", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="op", help=f"{', '.join(OPS)} (default: all)")
    parser.add_argument("--device", default="cpu", choices=list(CLASSES))
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--keep-going", action="store_true", help="collect faults instead of stopping at the first")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; an incomplete certificate is no success")
    parser.add_argument("--out", type=Path, help="the same JSON in a file")
    args = parser.parse_args(argv)
    if unknown := set(args.ops) - set(OPS):
        parser.error(f"{', '.join(sorted(unknown))}: no such op; there are {', '.join(OPS)}")
    if args.device == "interpreter" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--device interpreter: set TRITON_INTERPRET=1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU")
    try:
        ops = [op for op in OPS if op in (args.ops or OPS)]
        record = certificate(ops, args.device, args.quick, args.keep_going, args.seconds, args.out)
    except build.KernelError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 4
    print(json.dumps(record, indent=1))
    return 0 if record["verdict"] == "certified" else 1


def certificate(
    ops: list[str], device: str, quick: bool = False, keep_going: bool = False, seconds: float = float("inf"), out: Path | None = None
) -> dict[str, Any]:
    """The certificate of these operations. `verdict` is "certified", "different" (a fault is recorded) or "incomplete" (out of time).

    `out` is written after every operation and dtype: a process that is killed leaves an incomplete certificate.
    """
    if device == "cpu":
        build.library()
    deadline, faults, results, cut = time.monotonic() + seconds, [], {}, False
    work = [(op, dtype) for op in ops for dtype in importlib.import_module(f"kernels.certify.{op}").DTYPES]
    for i, (op, dtype) in enumerate(work):
        module = importlib.import_module(f"kernels.certify.{op}")
        s = Setting(device, dtype, quick, getattr(module, "TENSOR_CORES", False), getattr(module, "NARROWS", False))
        started, before = time.monotonic(), len(faults)
        results.setdefault(op, {})[NAMES[dtype]], late = one(op, module, s, faults, keep_going, deadline)
        cut |= late
        state = "cut" if late else f"{len(faults) - before} faults" if len(faults) > before else "certified"
        print(f"{op} {NAMES[dtype]}: {state}, {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
        last = i == len(work) - 1 or (faults and not keep_going)
        if out:
            out.write_text(json.dumps(record(device, quick, results, faults, cut or not last), indent=1) + "\n")
        if last:
            break
    return record(device, quick, results, faults, cut)


def one(op: str, module: Any, s: Setting, faults: list[dict[str, str]], keep_going: bool, deadline: float) -> tuple[dict[str, Any], bool]:
    """One operation and dtype; appends to `faults`."""
    own: list[dict[str, str]] = []

    def failed(case: Case | None, fault: Exception) -> None:
        own.append(described(op, s, case, fault))
        print(" ".join(f"{key}: {value};" for key, value in own[-1].items()), file=sys.stderr, flush=True)
        if not keep_going or len(own) == MAX_FAULTS:
            raise Stop

    late, tallies = False, {}
    try:
        certify_into(tallies, module, s, failed, lambda: time.monotonic() > deadline)
    except TimeoutError:
        late = True
    except Stop:
        pass
    faults += own
    kinds = {kind: tally.record() for kind, tally in tallies.items()}
    state = {"not certified": "the rule: products on tensor cores, in the hardware's order"} if not s.has_rule else {}
    return kinds | state | ({"cut": "out of time"} if late else {}), late


def certify_into(tallies: dict, module: Any, s: Setting, failed: Any, out_of_time: Any) -> None:
    """`tallies` are filled as cases pass. A fault while the cases are being set up counts as one, too."""
    try:
        if s.device == "interpreter" and not s.has_rule:  # Triton against itself: expectations come from it, too
            with s.under_test():
                certify(tallies, module.cases(s), nullcontext, failed, out_of_time)
        else:
            certify(tallies, module.cases(s), s.under_test, failed, out_of_time)
    except (Stop, TimeoutError):
        raise
    except Exception as fault:
        failed(None, fault)


def described(op: str, s: Setting, case: Case | None, fault: Exception) -> dict[str, str]:
    """A fault for the certificate: op, dtype, case, and the element with both values or the error."""
    where = {"op": op, "dtype": NAMES[s.dtype], "case": f"{case.kind}: {case.name}" if case else "setting up the cases"}
    if isinstance(fault, Difference):
        return where | {"element": fault.at, "got": fault.got, "expected": fault.expected}
    kind = "not available" if isinstance(fault, NotAvailable | ImportError | NotImplementedError) else "error"
    return where | {kind: f"{type(fault).__name__}: {fault}".split("\n")[0]}


def record(device: str, quick: bool, results: dict, faults: list[dict[str, str]], cut: bool) -> dict[str, Any]:
    return {
        "verdict": "different" if faults else "incomplete" if cut else "certified",
        "faults": faults,
        "device": device,
        "class": CLASSES[device],
        "quick": quick,
        "environment": environment(device),
        "ops": results,
    }


def environment(device: str) -> dict[str, Any]:
    """Versions and hardware; no paths and no names of machines."""
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine()}
    if device == "cpu":
        return facts | {"kernels": build.build_id(), "builds": build.runnable_builds(), "threads": list(THREADS)}
    import triton

    facts["triton"] = triton.__version__
    return facts | ({"card": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()} if device == "cuda" else {})


if __name__ == "__main__":
    sys.exit(main())

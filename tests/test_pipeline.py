"""The whole path in a clone of its own: config, DVC, ranks on DeepSpeed, comparison - and the golden digest that README states."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = re.search(r"^identical: ([0-9a-f]{64})$", (ROOT / "README.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A working copy with an empty cache."""
    folder = tmp_path_factory.mktemp("clone") / "lockstep"
    leave = shutil.ignore_patterns(".git", ".venv", "runs", "reports", "logs", "cache", "tmp", "mlflow.db*", "__pycache__", "dvc.lock")
    shutil.copytree(ROOT, folder, ignore=leave)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def pipeline(folder: Path, *args: str) -> tuple[int, str]:
    """Exit code, and stdout with stderr's end for the message of a failing test."""
    env = os.environ | {"PYTHONPATH": "", "MLFLOW_TRACKING_URI": ""}
    command = [sys.executable, "-m", "pipeline", *args, "tracking=none"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout or done.stderr[-2000:]


def test_layouts_and_kernel_builds_end_in_the_golden_digest(clone):
    assert GOLDEN, "README states no golden digest"
    code, out = pipeline(clone, "-m", "layout=tp1cp1dp1,tp2cp2", "name=golden")
    assert (code, out.splitlines()[-1]) == (0, f"identical: {GOLDEN[1]}")
    code, out = pipeline(clone, "layout=dp3", "layout.zero=2", "launch.kernel_build=avx2", "name=golden")  # 16 samples over 3 ranks
    assert (code, out.splitlines()[-1]) == (0, f"identical: {GOLDEN[1]}")
    assert len(out.splitlines()) == 4


@pytest.mark.slow
def test_bf16_storage_holds_the_contract_too(clone):
    code, out = pipeline(clone, "-m", "layout=tp1cp1dp1,tp2cp2,dp2z3", "numerics.precision=bf16", "name=half")
    assert code == 0, out
    assert out.splitlines()[-1].startswith("identical: ") and GOLDEN[1] not in out  # another experiment


def test_pytorchs_own_kernels_are_found_to_differ(clone):
    code, out = pipeline(clone, "kernels.case=P/P", "-m", "layout=tp1cp1dp1,tp2", "iterations=1", "name=control")
    assert code == 3, out
    assert out.splitlines()[-1].startswith("different: "), out

"""The whole path in a clone of its own: config, DVC, ranks on DeepSpeed, comparison - and the golden digest that README states."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from working_copy import ROOT, make_working_copy, pipeline

GOLDEN = re.search(r"^identical: ([0-9a-f]{64})$", (ROOT / "README.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    return make_working_copy(tmp_path_factory.mktemp("clone") / "lockstep")


def test_layouts_and_kernel_builds_end_in_the_golden_digest(clone):
    assert GOLDEN, "README states no golden digest"
    code, out = pipeline(clone, "-m", "layout=tp1cp1dp1,tp2cp2", "name=golden")
    assert (code, out.splitlines()[-1]) == (0, f"identical: {GOLDEN[1]}")
    # 16 samples over 3 ranks, sampled by 2 that share each prompt, in segments of 2 and 1 iterations
    code, out = pipeline(clone, "layout=dp3z2-rtp1cp2dp1-s2-avx2", "name=golden")
    assert (code, out.splitlines()[-1]) == (0, f"identical: {GOLDEN[1]}")
    runs = [line.split()[0] for line in out.splitlines() if GOLDEN[1] in line]
    assert runs == ["golden-tp1cp1dp1", "golden-tp2cp2", "golden-dp3z2-rtp1cp2dp1-s2-avx2", "identical:"]
    comparison = json.loads((clone / "reports/golden/comparison.json").read_text())
    assert comparison["verification"] == "cached" and comparison["totals"]["layouts"] == 3


@pytest.mark.slow
def test_a_killed_segment_goes_on_and_fresh_means_executed(clone):
    command = [sys.executable, "-m", "pipeline", "layout=tp2-s9", "iterations=9", "name=killed", "tracking=none"]
    running = subprocess.Popen(command, cwd=clone, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (found := list(clone.glob("logs/killed-tp2-*/segment.json"))) and running.poll() is None:
        time.sleep(0.05)
    assert found, "the run ended before it could be killed"
    running.kill()
    running.wait()
    again = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "goes on after iteration" in again.stderr
    assert not found[0].exists(), "what is complete is DVC's"
    code, out = pipeline(clone, "layout=tp1cp1dp1", "iterations=9", "name=killed", "verify=fresh")
    assert code == 0 and out.splitlines()[-1].startswith("identical: "), out
    comparison = json.loads(next(clone.glob("reports/killed-*/comparison.json")).read_text())
    assert comparison["verification"] == "fresh"
    assert {how for run in comparison["runs"] for how in run["executed_or_cached"].values()} == {"executed"}


@pytest.mark.slow
def test_bf16_storage_holds_the_contract_too(clone):
    code, out = pipeline(clone, "-m", "layout=tp1cp1dp1,tp2cp2,dp2z3", "numerics.precision=bf16", "name=half")
    assert code == 0, out
    assert out.splitlines()[-1].startswith("identical: ") and GOLDEN[1] not in out  # another experiment


def test_pytorchs_own_kernels_are_found_to_differ(clone):
    code, out = pipeline(clone, "kernels.case=P/P", "-m", "layout=tp1cp1dp1,tp2", "iterations=1", "name=control")
    assert code == 3, out
    assert out.splitlines()[-1].startswith("different: "), out

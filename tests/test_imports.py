"""Imports run one way, and the light side of the pipeline stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.paths import ROOT

OURS = {"kernels", "pipeline", "stages"}
HEAVY = {"torch", "deepspeed", "mlflow", "transformers", "datasets"}


def imported(path: Path, top_level_only: bool = False) -> set[str]:
    """Top packages a file imports; only those of its import time with `top_level_only`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if top_level_only:
        for node in ast.walk(tree):
            later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if later or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
                node.body = []  # type: ignore[attr-defined]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else (node.module or "").split(".")[0])
    return names


def sources(package: str) -> list[Path]:
    return [path for path in (ROOT / package).rglob("*.py") if "_build" not in path.parts]


def test_kernels_import_nothing_of_ours():
    allowed = {"kernels", "torch", "triton", "numpy", *sys.stdlib_module_names}
    for path in sources("kernels"):
        assert imported(path) <= allowed, path


def test_the_pipeline_never_imports_the_stages_and_kernels_only_inside_functions():
    for path in sources("pipeline"):
        assert "stages" not in imported(path), path
        assert "kernels" not in imported(path, top_level_only=True), path


def test_importing_the_pipeline_or_a_stages_entry_imports_nothing_heavy():
    for path in sources("pipeline"):
        assert not imported(path, top_level_only=True) & HEAVY, path
    for stage in ("fetch", "prompts", "rollout", "ref_logprob", "train", "validate", "compare", "track"):
        assert not imported(ROOT / f"stages/{stage}.py", top_level_only=True) & HEAVY, stage


def test_the_verifier_imports_nothing_but_the_standard_library_and_itself():
    for path in sources("pipeline/verify"):
        assert imported(path) <= {".", *sys.stdlib_module_names}, path
        levels = {node.level for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        assert levels <= {0, 1}, path  # its own folder and none above


@pytest.mark.parametrize("module", ["__main__", "config", "layout", "registry", "checks", "repro", "environment", "digest"])
def test_light_modules_leave_torch_out_of_the_process(module):
    script = f"import sys, pipeline.{module}; print(*sorted(set(sys.modules) & {HEAVY | {'stages', 'kernels'}!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("stage", ["rollout", "ref_logprob", "train"])
def test_a_stages_client_does_not_even_load_numpy(stage):
    script = f"import sys, stages.{stage}; print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True).stdout == "False\n"


def test_help_is_instant_and_imports_nothing_heavy():
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "pipeline", "--help"], cwd=ROOT, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    assert done.returncode == 0 and "python -m pipeline -m layout=tp2,cp2" in done.stdout
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert {"hydra", "pipeline"} <= loaded and not loaded & (HEAVY | {"numpy"})
    assert seconds < 2 or sum(1 for _ in loaded) < 200, f"{seconds:.1f} s"


def test_the_import_check_sees_an_import():
    path = ROOT / "tests/test_imports.py"
    assert {"ast", "pipeline"} <= imported(path, top_level_only=True)

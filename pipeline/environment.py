"""env.json: what the results depend on besides the project's files. A dependency of DVC's stages, so that another torch runs them again.

Not in it: CPU flags, cores, host. The CPU kernels give the same bits on all of them, and a test holds that.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeline.paths import ROOT

PACKAGES = (
    "torch", "deepspeed", "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub", "datasets", "numpy",
    "math-verify", "latex2sympy2_extended", "sympy", "jinja2",
)  # fmt: skip


def fingerprint() -> dict[str, object]:
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "machine": platform.machine(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": devices(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def devices() -> list[str]:
    """The kinds of device the ranks compute on: GPU names and driver, or ["cpu"]. Without importing torch."""
    if (_version("torch") or "").endswith("+cpu") or not shutil.which("nvidia-smi"):
        return ["cpu"]
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return ["cpu"]
    return sorted({line.strip() for line in lines if line.strip()}) or ["cpu"]


def refresh(root: Path = ROOT) -> bool:
    """Writes env.json if it says something else than the present. True when it did."""
    path = root / "env.json"
    content = json.dumps(fingerprint(), indent=2, sort_keys=True) + "\n"
    if path.exists() and path.read_text() == content:
        return False
    temporary = path.with_name(".env.json.tmp")
    temporary.write_text(content)
    temporary.replace(path)
    return True


if __name__ == "__main__":
    print(f"env.json: {'written' if refresh() else 'up to date'}", file=sys.stderr)

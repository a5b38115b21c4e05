"""A copy of the project with an empty cache, in which tests run the one command as a user does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LEFT = (".git", ".venv*", "runs", "reports", "logs", "cache", "tmp", "mlflow.db*", "__pycache__", "dvc.lock", "multirun", "outputs")


def make_working_copy(folder: Path) -> Path:
    """`folder`, which must not exist."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*_LEFT))
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def run_module(folder: Path, *command: str) -> tuple[int, str]:
    """python -m COMMAND: exit code, and stdout, or stderr's end for the message of a failing test."""
    env = os.environ | {"PYTHONPATH": "", "MLFLOW_TRACKING_URI": ""}
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout or done.stderr[-2000:]


def pipeline(folder: Path, *args: str) -> tuple[int, str]:
    return run_module(folder, "pipeline", *args, "tracking=none")


def patch(folder: Path, file: str, old: str, new: str) -> None:
    """A bug, or its repair: text that must be there once."""
    (folder / file).write_text(replaced_once((folder / file).read_text(), old, new, file))


def replaced_once(text: str, old: str, new: str, file: str) -> str:
    if text.count(old) != 1:
        raise ValueError(f"{file}: the text to replace occurs {text.count(old)} times, expected once: {old.strip()}")
    return text.replace(old, new)

"""A clone for one test, so with its own fork server, and clients in it. No preloads unless a test wants them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from pipeline.launch import processes

ROOT = Path(__file__).resolve().parents[1]


class Clone:
    """A copy of `pipeline` with the test's functions, and clients that run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "clone"
        shutil.copytree(ROOT / "pipeline", self.folder / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "tests/launch_jobs.py", self.folder)
        self.pids = folder / "pids"
        self.pids.mkdir()
        (folder / "run").mkdir()
        self.environment = {**os.environ, "LOCKSTEP_PRELOAD": "", "XDG_RUNTIME_DIR": str(folder / "run")}

    def command(self, function: str, world_size: int = 2, **request) -> list[str]:
        launcher_args = request.pop("args", {})
        request |= {"function": f"launch_jobs:{function}", "world_size": world_size, "args": {"folder": str(self.pids), **launcher_args}}
        return [sys.executable, "-m", "launch_jobs", json.dumps(request)]

    def start(self, *args, prefix: tuple[str, ...] = (), environment: dict[str, str] | None = None, **request) -> subprocess.Popen:
        command = [*prefix, *self.command(*args, **request)]
        environment = {**self.environment, **(environment or {})}
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *args, **request) -> subprocess.CompletedProcess:
        client = self.start(*args, **request)
        out, err = client.communicate(timeout=200)
        return subprocess.CompletedProcess(client.args, client.returncode, out, err)

    def result(self, *args, **request) -> dict:
        done = self.run(*args, **request)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def rank_pids(self, world_size: int = 2) -> list[int]:
        """Once the ranks of `misbehave` are there."""
        paths = [self.pids / f"pid.{rank}" for rank in range(world_size)]
        wait_for(lambda: all(path.exists() for path in paths), 60)
        return [int(path.read_text()) for path in paths]


def wait_for(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def gone(*pids: int) -> bool:
    return all(processes.identify(pid) is None for pid in pids)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

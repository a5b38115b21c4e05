"""A working copy of the project with an experiment that has been run: source code can be broken in it, and layouts run again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline import registry
from pipeline.digest import read_json
from pipeline.errors import ResultsDiffer
from pipeline.segments import segment_length
from tests.mutations.runs import found_in
from tests.mutations.verdicts import Found
from tests.working_copy import make_working_copy, replaced_once

# Tiny, but with all that a mutation needs: mixed lengths, non-zero advantages, a clip and a learning rate that are at work.
EXPERIMENT = (
    "experiment=tiny", "name=mutation", "iterations=2", "data.max_digits=1", "sampling.prompts_per_iteration=2",
    "sampling.max_new_tokens=12", "optimizer.schedule=linear", "optimizer.max_grad_norm=0.01", "launch.idle_seconds=10", "tracking=none",
)  # fmt: skip
ORACLE = "tp1cp1dp1"
LAYOUTS = ("tp3-s2", "dp2z1-m2-s2", "cp2")  # a segment of two iterations in one set of processes, twice; a stage for each step
SECONDS = 120  # a mutated run that takes longer hangs


class Clone:
    def __init__(self, folder: Path):
        """Raises RuntimeError when the unbroken code does not call its layouts identical."""
        self.folder = make_working_copy(folder / "lockstep")
        (self.folder / "params.yaml").unlink()  # no other experiment
        (folder / "run").mkdir()
        # the fork server's socket lies in `folder`, and the server goes away with this process
        own = {"XDG_RUNTIME_DIR": str(folder / "run"), "LOCKSTEP_STARTER_PID": str(os.getpid())}
        self.environment = os.environ | own | {"PYTHONPATH": "", "MLFLOW_TRACKING_URI": ""}
        code, text = self.pipeline(ORACLE, *LAYOUTS)
        known = registry.load(self.folder)
        self.experiment = known.experiment_keys()[0]
        self.keys = {name: next(key for key in known.run_keys() if f"-{name}-" in key) for name in (ORACLE, *LAYOUTS)}
        if code or self.found(code, "").verdict != "identical":
            raise RuntimeError(f"the unbroken code ends with {code}:\n{text}")
        self.kept = folder / "kept"
        for path in self._results():
            shutil.copytree(path, self.kept / path.relative_to(self.folder))

    def _results(self) -> list[Path]:
        runs = [self.folder / "runs" / key for key in self.keys.values()]
        return [*runs, self.folder / "reports"]

    def restore(self, key: str) -> None:
        for path in (self.folder / "runs" / key, self.folder / "reports"):
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(self.kept / path.relative_to(self.folder), path)

    # --- commands ---------------------------------------------------------------------------------------------------------------
    def command(self, *args: str, seconds: float = SECONDS) -> tuple[int, str]:
        """Exit code and output of `python -m ...` in the clone; 124 when it takes longer than `seconds`."""
        try:
            done = subprocess.run(
                [sys.executable, "-m", *args], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=seconds
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124, f"{' '.join(args)}: no end after {seconds:g} s"
        return done.returncode, done.stdout + done.stderr

    def pipeline(self, *layouts: str) -> tuple[int, str]:
        return self.command("pipeline", "-m", *EXPERIMENT, f"layout={','.join(layouts)}", seconds=600)

    def run_again(self, key: str) -> Found:
        """Run `key`, its validation and the comparison, stage by stage, as DVC would start them; all other runs stay as they are."""
        cfg = registry.load(self.folder).run(key)
        stages = [("segment", key)]
        if segment_length(cfg) == 1:
            steps = ("rollout", "ref_logprob", "train")
            stages = [(stage, key, "--iteration", str(i)) for i in range(1, cfg.iterations + 1) for stage in steps]
        for stage, *args in (*stages, ("validate", key), ("compare", self.experiment), ("track", self.experiment)):
            code, text = self.command(f"stages.{stage}", *args)
            if code and (stage, code) != ("track", ResultsDiffer.exit_code):
                return Found("failed", reasons=[line for line in reversed(text.splitlines()) if line.strip()], exit_code=code)
        return self.found(code, text)

    def found(self, code: int, text: str) -> Found:
        """What the comparison says that lies there; `failed` when the command ended otherwise than by its verdict."""
        if code not in (0, ResultsDiffer.exit_code):
            return Found("failed", reasons=[line for line in reversed(text.splitlines()) if line.strip()], exit_code=code)
        found = found_in(read_json(self.folder / "reports" / self.experiment / "comparison.json"))
        return Found(found.verdict, found.place, found.reasons, code)

    # --- source code ------------------------------------------------------------------------------------------------------------
    @contextmanager
    def patched(self, file: str, old: str, new: str) -> Iterator[None]:
        path = self.folder / file
        text = path.read_text()
        path.write_text(replaced_once(text, old, new, file))
        try:
            yield
        finally:
            path.write_text(text)

"""--jobs: runs made side by side in git worktrees are those that one after another give, and the clone executes none of them again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from working_copy import make_working_copy, pipeline

from pipeline import parallel
from pipeline.errors import MissingPrerequisite, UserError


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    folder = make_working_copy(tmp_path_factory.mktemp("parallel") / "lockstep")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t.invalid", "-C", str(folder)]
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "all"], check=True)
    return folder


def test_bad_values_are_refused_before_anything_starts(clone, monkeypatch):
    parallel.check(2, "basic", clone)
    with pytest.raises(UserError, match="--jobs 0: give 1 or more"):
        parallel.check(0, "basic", clone)
    with pytest.raises(UserError, match="--launcher slurm: unknown"):
        parallel.check(2, "slurm", clone)
    monkeypatch.setattr(parallel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPrerequisite, match="pip install ray"):
        parallel.check(2, "ray", clone)


def test_what_is_not_committed_is_refused_by_name(clone, tmp_path):
    new = clone / "stages" / "uncommitted.py"
    new.touch()
    with pytest.raises(UserError, match=r"stages/uncommitted.py is not committed"):
        parallel.check(2, "basic", clone)
    new.unlink()
    with pytest.raises(MissingPrerequisite, match="a clone with git is needed"):
        parallel.check(2, "basic", tmp_path)


def test_worktrees_share_the_cache_and_go_away(clone):
    (clone / "env.json").write_text("{}")
    with parallel.worktrees(2, clone) as folders:
        assert [folder.name for folder in folders] == ["job1", "job2"]
        for folder in folders:
            assert (folder / "params.yaml").read_bytes() == (clone / "params.yaml").read_bytes()
            assert str(clone / ".dvc/cache") in (folder / ".dvc/config.local").read_text()
        with pytest.raises(ZeroDivisionError), parallel.worktrees(1, clone):
            _ = 1 / 0
    assert not list((clone / ".dvc/tmp/worktrees").iterdir())
    listed = subprocess.run(["git", "-C", clone, "worktree", "list"], capture_output=True, text=True).stdout
    assert len(listed.splitlines()) == 1


@pytest.mark.slow
def test_runs_made_side_by_side_are_not_executed_again(clone):
    code, out = pipeline(clone, "-m", "layout=tp1cp1dp1,tp2,cp2", "iterations=1", "name=jobs", "--jobs", "2")
    assert code == 0 and out.splitlines()[-1].startswith("identical: "), out
    comparison = json.loads(next(clone.glob("reports/jobs-*/comparison.json")).read_text())
    assert {how for run in comparison["runs"] for how in run["executed_or_cached"].values()} == {"executed"}  # by the jobs: their logs came
    checked_out = {path: path.stat().st_mtime_ns for path in clone.glob("logs/jobs-*/i0001/*.json")}
    folder = next(clone.glob("runs/jobs-tp2-*"))
    subprocess.run(["rm", "-r", folder], check=True)
    assert pipeline(clone, "-m", "layout=tp1cp1dp1,tp2,cp2", "iterations=1", "name=jobs")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in checked_out} == checked_out, "a stage was executed in the clone"

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from pipeline import compose, failures, registry, repro
from pipeline.config import experiment_digest
from pipeline.errors import MissingPrerequisite, ResultsDiffer, UserError
from pipeline.paths import ROOT, Paths, step
from pipeline.registry import Run
from stages import entry


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    command_lines = [["layout=tp1cp1dp1"], ["layout=tp2"], ["optimizer.lr=5e-07", "layout=tp2"], ["launch.threads=2"]]
    with compose.composing():
        composed = [compose.compose_run(overrides) for overrides in command_lines]
    return dict(zip(("oracle", "tp2", "slow", "threads"), composed))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    return tmp_path


def never(overrides: list[str]) -> Run:
    raise AssertionError(f"composed again: {overrides}")


def edit_conf(project: Path) -> None:
    path = project / "conf/experiment/tiny.yaml"
    path.write_text(path.read_text() + "# edited\n")


def test_upsert_keeps_other_runs_and_groups_by_experiment(project, runs):
    registry.upsert([runs["oracle"], runs["slow"]], never, project)
    after = registry.upsert([runs["tp2"], runs["threads"]], never, project)
    assert set(after.run_keys()) == {run.key for run in runs.values()}
    assert after.experiment("tiny").runs == ["tiny-tp1cp1dp1", "tiny-tp2", runs["threads"].key]
    assert after.experiment("tiny").digest == experiment_digest(runs["oracle"].config)
    assert after.experiment(runs["slow"].experiment).runs == [runs["slow"].key]
    assert after.experiment_of("tiny-tp2") == "tiny"
    for run in runs.values():
        assert after.run(run.key) == run.config  # typed, 5e-07 included
    assert after.run(runs["slow"].key).optimizer.lr == 5e-07


def test_an_unchanged_registry_is_not_written_again(project, runs):
    registry.upsert([runs["oracle"]], never, project)
    before = (project / "params.yaml").stat()
    registry.upsert([runs["oracle"]], never, project)
    assert (project / "params.yaml").stat().st_mtime_ns == before.st_mtime_ns


def test_concurrent_upserts_lose_nothing(project):
    script = f"""
import sys
from pathlib import Path
from pipeline import compose, registry
with compose.composing():
    for layout in sys.argv[1:]:
        registry.upsert([compose.compose_run(["layout=" + layout])], compose.compose_run, Path({str(project)!r}))
"""
    layouts = [["tp2", "cp2", "dp2"], ["tp3", "cp4", "dp3"]]
    processes = [subprocess.Popen([sys.executable, "-c", script, *names], cwd=ROOT) for names in layouts]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert set(registry.load(project).run_keys()) == {f"tiny-{name}" for names in layouts for name in names}


def test_another_conf_is_refused_by_the_stages_and_composed_again_by_the_command(project, runs):
    registry.upsert([runs["oracle"], runs["slow"], runs["tp2"]], never, project)
    edit_conf(project)
    with pytest.raises(UserError, match="^params.yaml: was composed from another conf/ .* run `python -m pipeline`"):
        registry.load(project)
    again = []

    def recompose(overrides: list[str]) -> Run:
        again.append(overrides)
        if overrides == runs["slow"].overrides:
            raise UserError("layout=tp2: no such choice")
        run = next(run for run in runs.values() if run.overrides == overrides)
        return replace(run, config=replace(run.config, iterations=5))

    new = replace(runs["tp2"], config=replace(runs["tp2"].config, iterations=5))
    after = registry.upsert([new], recompose, project)
    assert again == [runs["oracle"].overrides, runs["slow"].overrides, runs["tp2"].overrides]
    assert after.run_keys() == ["tiny-tp1cp1dp1", "tiny-tp2"]  # what no longer composes is left out
    assert after.run("tiny-tp1cp1dp1").iterations == 5
    assert "tiny-tp1cp1dp1-s0005" in OmegaConf.load(project / "params.yaml").steps


def test_an_edited_params_yaml_is_refused_by_the_stages_and_composed_again_by_the_command(project, runs):
    """DVC sees a segment's configuration by its digest alone: an edit behind it would bring back results of another configuration."""
    registry.upsert([runs["oracle"]], never, project)
    path = project / "params.yaml"
    path.write_text(path.read_text().replace("iterations: 3", "iterations: 4"))
    with pytest.raises(UserError, match=r"^runs.tiny-tp1cp1dp1: was edited in params.yaml, .* run `python -m pipeline` again"):
        registry.load(project).run("tiny-tp1cp1dp1")
    after = registry.upsert([], lambda overrides: runs["oracle"], project)
    assert after.run("tiny-tp1cp1dp1").iterations == 3


def test_a_stage_refuses_another_configuration_than_the_one_that_dvc_read(project, runs, monkeypatch):
    known = registry.upsert([runs["oracle"]], never, project)
    monkeypatch.setattr(registry, "load", lambda: known)
    monkeypatch.setattr(entry.launch, "guard_process", lambda: None)
    digest = known.digest_of("tiny-tp1cp1dp1")
    assert entry.parse("validate", ["tiny-tp1cp1dp1", "--digest", digest]).key == "tiny-tp1cp1dp1"
    with pytest.raises(UserError, match="^runs.tiny-tp1cp1dp1: was composed anew while DVC was at work"):
        entry.parse("validate", ["tiny-tp1cp1dp1", "--digest", digest[::-1]])


def test_tracking_belongs_to_the_experiment(project, runs):
    registry.upsert([runs["oracle"], runs["tp2"]], never, project)
    content = dict(OmegaConf.load(project / "params.yaml"))
    elsewhere = replace(runs["oracle"].config, tracking=replace(runs["oracle"].config.tracking, experiment="elsewhere"))
    after = registry.upsert([replace(runs["oracle"], config=elsewhere)], never, project)
    assert after.run("tiny-tp2").tracking.experiment == "elsewhere"
    changed = dict(OmegaConf.load(project / "params.yaml"))
    for section in ("runs", "steps", "checkpoints", "prompts", "validations"):  # what fetch, rollout and train depend on
        assert changed[section] == content[section]


def test_one_name_for_two_checkpoints_is_an_error(project, runs):
    config = runs["slow"].config
    other = replace(runs["slow"], config=replace(config, checkpoint=replace(config.checkpoint, seed=7)))
    with pytest.raises(UserError, match="^checkpoint.name=tiny: run .* gives this name to other contents"):
        registry.upsert([runs["oracle"], other], never, project)
    assert not (project / "params.yaml").exists()


def test_steps_hand_weights_and_state_from_one_iteration_to_the_next(project, runs):
    registry.upsert([runs["oracle"]], never, project)
    first, second, third = (step(Paths(project), "tiny-tp1cp1dp1", i, "tiny") for i in (1, 2, 3))
    assert first.weights_in == project / "runs/checkpoints/tiny" and first.state_in is None
    assert (first.version_in, first.version_out) == ("weight_v000001", "weight_v000002")
    assert (second.weights_in, second.state_in) == (first.weights_out, first.state_out)
    assert third.weights_out == project / "runs/tiny-tp1cp1dp1/weights/weight_v000004"
    entry = OmegaConf.load(project / "params.yaml").steps["tiny-tp1cp1dp1-s0002"]
    assert project / entry.weights_in == second.weights_in and project / entry.folder / "rollout" == second.rollout


def test_a_run_in_segments_is_one_stage(project, runs):
    config = runs["oracle"].config
    long = replace(runs["oracle"], config=replace(config, launch=replace(config.launch, segment=2)))
    registry.upsert([long, runs["tp2"]], never, project)
    content = OmegaConf.load(project / "params.yaml")
    assert list(content.segments) == ["tiny-tp1cp1dp1"] and {entry.run for entry in content.steps.values()} == {"tiny-tp2"}
    assert content.segments["tiny-tp1cp1dp1"].run == content.validations["tiny-tp1cp1dp1"].run == "runs/tiny-tp1cp1dp1"


def test_sections_are_typed(project, runs):
    registered = registry.upsert([runs["oracle"]], never, project)
    assert registered.checkpoint("tiny") == runs["oracle"].config.checkpoint
    checkpoint, data = registered.prompts("tiny--arithmetic")
    assert checkpoint.name == "tiny" and data.num_prompts == runs["oracle"].config.data.num_prompts
    with pytest.raises(UserError, match=r"^runs.nope: not in params.yaml \(there: tiny-tp1cp1dp1\)"):
        registered.run("nope")


def test_without_params_yaml_the_remedy_is_named(tmp_path):
    with pytest.raises(MissingPrerequisite, match="^params.yaml: missing; make it with `python -m pipeline`"):
        registry.load(tmp_path)


# --- the shipped files -------------------------------------------------------------------------------------------------------
def test_the_shipped_params_yaml_is_that_of_conf_and_holds_the_default_experiment():
    registered = registry.load()
    layouts = OmegaConf.load(ROOT / "conf/experiment/tiny.yaml").hydra.sweeper.params.layout.split(",")
    assert {f"tiny-{layout}" for layout in layouts} <= set(registered.experiment("tiny").runs)


def test_dvc_yaml_resolves_and_every_file_it_names_is_there():
    listed = subprocess.run([sys.executable, "-m", "dvc", "stage", "list", "--name-only"], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    names = set(listed.stdout.split())
    assert {"config", "fetch@tiny", "prompts@tiny--arithmetic", "compare@tiny", "track@tiny", "validate@tiny-tp2"} <= names
    assert {f"{stage}@tiny-tp2-s0003" for stage in ("rollout", "ref_logprob", "train")} <= names
    for name, stage in OmegaConf.to_container(OmegaConf.load(ROOT / "dvc.yaml"), resolve=False)["stages"].items():  # type: ignore
        for path in (stage.get("do") or stage)["deps"]:
            assert "${" in path or path == "env.json" or (ROOT / path).exists(), f"{name}: {path}"


# --- around DVC --------------------------------------------------------------------------------------------------------------
def comparison(verdict: str) -> dict:
    times = {"tiny-tp1cp1dp1": ("aa", (0.5, 1.5)), "tiny-tp2": ("ab", (1.0, 2.0)), "tiny-cp2": ("aa", (1.0, None))}
    runs = [
        {"run_id": key, "result_digest": digest, "performance": {str(i): {"perf/step_time": t} for i, t in enumerate(steps)}}
        for key, (digest, steps) in times.items()
    ]
    result = {"verdict": verdict, "result_digest": "aa", "reasons": ["iteration 2, weights: ..."], "oracle": "tiny-tp1cp1dp1"}
    return {**result, "runs": runs}


def test_verdicts_and_exit_codes(tmp_path, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(repro, "run_dvc", lambda targets, root, _: asked.append(targets))
    for key, verdict in (("same", "identical"), ("other", "different")):
        path = tmp_path / "reports" / key / "comparison.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(comparison(verdict)))
    assert repro.verdict_of("same", tmp_path) == 0
    table, report, verdict = (lines := capsys.readouterr().out.splitlines())[:-2], lines[-2], lines[-1]
    assert [line.split() for line in table] == [
        ["run", "result", "digest", "time", "ratio"], ["tiny-tp1cp1dp1", "aa", "2.0", "s", "1.00"], ["tiny-tp2", "ab", "3.0", "s", "1.50"],
        ["tiny-cp2", "aa", "-", "-"],
    ]  # fmt: skip
    assert (report, verdict) == ("report: reports/same/comparison.html", "identical: aa")
    assert repro.verdict_of("other", tmp_path) == ResultsDiffer.exit_code == 3
    assert "different: iteration 2, weights: ...\n" in capsys.readouterr().out
    assert asked == [["config", "track@same"], ["config", "track@other"]]
    with pytest.raises(MissingPrerequisite):
        repro.verdict_of("none", tmp_path)


@pytest.mark.parametrize(
    "stage, key, stage_exit_code, believed", [("track", "tiny", 3, True), ("track", "tiny", 1, False), ("track", "other", 3, False)]
)
def test_an_old_verdict_is_not_read_after_a_failure(tmp_path, capsys, monkeypatch, stage, key, stage_exit_code, believed):
    def failing(targets, root, experiment):
        raise repro.StageFailed(f"{stage} {key}: ...", stage_exit_code, stage, key)

    monkeypatch.setattr(repro, "run_dvc", failing)
    path = tmp_path / "reports/tiny/comparison.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(comparison("different")))
    if believed:
        assert repro.verdict_of("tiny", tmp_path) == 3
    else:
        with pytest.raises(repro.StageFailed):
            repro.verdict_of("tiny", tmp_path)
    assert bool(capsys.readouterr().out) == believed


def test_a_failed_stage_gives_its_own_exit_code(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    shutil.copytree(ROOT / ".dvc", tmp_path / ".dvc", ignore=shutil.ignore_patterns("tmp", "cache"))
    (tmp_path / "dvc.yaml").write_text("stages:\n  config:\n    cmd: python fail.py\n")
    (tmp_path / "fail.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\n"
        "from pipeline.failures import Failure, record\n"
        "record(Failure('fetch', 'tiny', None, 4, 'checkpoint.repo=x: no such folder'), Path.cwd())\n"
        "sys.exit(4)\n"
    )
    with pytest.raises(repro.StageFailed, match="^fetch tiny: checkpoint.repo=x: no such folder .*--forget KEY") as error:
        repro.run_dvc(["config"], tmp_path)
    assert error.value.exit_code == 4
    (tmp_path / "fail.py").write_text("raise SystemExit(9)\n")  # died without a word: a failure of an earlier command is not reported
    with pytest.raises(repro.StageFailed, match="^dvc repro config: failed with code 255") as error:
        repro.run_dvc(["config"], tmp_path)
    assert error.value.exit_code == 1 and failures.last(tmp_path) is None


def test_forget_takes_out_runs_and_experiments(project, runs):
    registry.upsert(runs.values(), never, project)
    left = registry.upsert([], never, project, forget=[runs["oracle"].key, runs["slow"].experiment])
    assert set(left.run_keys()) == {runs["tp2"].key, runs["threads"].key}
    assert left.experiment_keys() == ["tiny"]

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from pipeline import checks, compose, config, layout_names, source_checks
from pipeline.config import Config, experiment_digest, experiment_half, to_config
from pipeline.errors import MissingPrerequisite, UserError
from pipeline.layout import layout_name
from pipeline.paths import ROOT
from pipeline.segments import segments

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))
LAYOUTS = sorted(path.stem for path in (ROOT / "conf/layout").glob("*.yaml"))


@pytest.fixture(scope="module", autouse=True)
def composing():
    with compose.composing():
        yield


def run_command(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "pipeline", *args], cwd=ROOT, capture_output=True, text=True)


# --- what is shipped ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_layout_of_every_experiment_composes(experiment):
    composed = hydra.compose("config", [f"experiment={experiment}"])
    for layout in LAYOUTS:
        try:
            checks.check(to_config(OmegaConf.merge(composed, {"layout": OmegaConf.load(ROOT / f"conf/layout/{layout}.yaml")})))
        except UserError as error:  # a layout the model cannot have is refused for that reason only
            assert str(error).startswith("layout.tp="), error


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiments_own_sweep_is_valid_and_one_experiment(experiment):
    composed = hydra.compose("config", [f"experiment={experiment}"], return_hydra_config=True)
    axes = [[f"{axis}={value}" for value in values.split(",")] for axis, values in composed.hydra.sweeper.params.items()]
    runs = [compose.compose_run([f"experiment={experiment}", *choices]) for choices in itertools.product(*axes)]
    assert len({run.key for run in runs}) == len(runs) > 1
    digests: dict[str, set[str]] = {}  # kernels decide bits: each case is an experiment of its own
    for run in runs:
        assert run.experiment.startswith(experiment)
        digests.setdefault(run.config.kernels.case_id, set()).add(experiment_digest(run.config))
    assert all(len(own) == 1 for own in digests.values())


@pytest.mark.parametrize("group", ["checkpoint", "data", "objective", "kernels", "tracking"])
def test_every_group_choice_has_the_types_of_the_schema(group):
    schema: Any = {"checkpoint": config.Checkpoint, "data": config.Data, "objective": config.Objective, "kernels": config.Kernels}
    for path in (ROOT / "conf" / group).glob("*.yaml"):
        section = OmegaConf.merge(OmegaConf.structured(schema.get(group, config.Tracking)), OmegaConf.load(path))
        if group in ("checkpoint", "data"):
            assert section.name == path.stem


def test_layout_presets_are_named_after_their_degrees():
    for path in (ROOT / "conf/layout").glob("*.yaml"):
        layout = OmegaConf.load(path)
        assert set(layout) == {"tp", "cp", "dp", "zero"}
        assert layout_name(layout.tp, layout.cp, layout.dp, layout.zero) == path.stem


NAMES = [
    "tp2",
    "tp2cp4dp2z3",
    "dp3z1-m1",
    "cp2-nopack",
    "tp2-rtp1cp2dp4",
    "dp2-b3-t2-avx2",
    "tp1cp1dp1-s3",
    "tp2cp2-rtp1cp1dp2-m2-b1-t2-s3-avx2",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_needs_only_its_name(name):
    run = compose.compose_run([f"layout={name}"])
    assert compose.compose_run([f"layout={name}"]).key == run.key
    assert set(run.key.split("-")) == {"tiny", *name.split("-")}, "the key spells the layout out"
    again = compose.compose_run([f"layout={run.key.removeprefix('tiny-')}"])
    assert again.config == run.config
    assert run.experiment == "tiny"


def test_what_is_no_name_of_a_layout():
    for name in ("", "tp", "tp2-", "tp2-m", "tp2-m1-m2", "tp2-r", "tp2-turbo", "cp2tp2", "tp-1", "tp2.m1"):
        assert layout_names.parse(name) is None, name
    with pytest.raises(UserError, match="^layout=tp2-turbo: no such choice; use tp1cp1dp1, .*, or degrees and options such as"):
        compose.compose_run(["layout=tp2-turbo"])


def test_a_rollout_with_more_ranks_than_training_has_no_segments():
    assert compose.compose_run(["layout=tp1cp1dp1-rdp2"]).config.launch.segment == 0
    with pytest.raises(UserError, match="^launch.segment=3: its rollout runs in the 1 ranks of training, layout.rollout asks for 2;"):
        compose.compose_run(["layout=tp1cp1dp1-rdp2-s3"])
    assert segments(compose.compose_run(["iterations=60", "layout=tp1cp1dp1-rdp2"]).config)[0] == range(1, 2)
    assert segments(compose.compose_run(["iterations=60"]).config) == [range(1, 26), range(26, 51), range(51, 61)]


# --- the split ---------------------------------------------------------------------------------------------------------------
def leaves(section: Any, prefix: str = "") -> list[str]:
    names = []
    for field in fields(section):
        value = getattr(section, field.name)
        names += leaves(value, f"{prefix}{field.name}.") if is_dataclass(value) else [f"{prefix}{field.name}"]
    return names


def changed(section: Any, name: str) -> Any:
    """A copy with another value under the dotted name."""
    head, _, rest = name.partition(".")
    value = getattr(section, head)
    return replace(section, **{head: changed(value, rest) if rest else another(value)})


def another(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case list():
            return [*value, 1]
        case dict():
            return value | {"more": 1}
        case _:
            return f"{value}x"


def test_execution_never_changes_the_experiment_digest_and_every_experiment_key_does():
    cfg = compose.compose_run([]).config
    digest = experiment_digest(cfg)
    for name in leaves(cfg):
        same = experiment_digest(changed(cfg, name)) == digest
        assert same == (name.split(".")[0] in config.EXECUTION_KEYS), name
    assert set(experiment_half(cfg)) == set(config.EXPERIMENT_KEYS)
    assert not set(config.EXPERIMENT_KEYS) & set(config.EXECUTION_KEYS)
    assert set(config.EXPERIMENT_KEYS) | set(config.EXECUTION_KEYS) == {field.name for field in fields(Config)}


# --- names -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "overrides, key, experiment",
    [
        ([], "tiny-tp1cp1dp1", "tiny"),
        (["layout=tp2"], "tiny-tp2", "tiny"),
        (["layout.tp=2", "layout.cp=4"], "tiny-tp2cp4", "tiny"),
        (["layout=dp2z3"], "tiny-dp2z3", "tiny"),
        (["kernels.case=P/P", "layout=cp2"], "tiny-cp2-P_P", "tiny-P_P"),
        (["kernels=PP", "layout=cp2"], "tiny-cp2-P_P", "tiny-P_P"),
        (["kernels.ffn=P/R"], "tiny-tp1cp1dp1-ffnP_R", "tiny-ffnP_R"),
        (["optimizer.lr=0.01"], "tiny-tp1cp1dp1", "tiny"),  # the preset's value: no other experiment
        (["tracking=none", "launch.idle_seconds=5"], "tiny-tp1cp1dp1", "tiny"),
    ],
)
def test_run_and_experiment_keys(overrides, key, experiment):
    run = compose.compose_run(overrides)
    assert (run.key, run.experiment) == (key, experiment)


def test_other_overrides_are_hashed_into_the_keys():
    threads, rate = compose.compose_run(["launch.launcher=torchrun"]), compose.compose_run(["optimizer.lr=0.5"])
    assert threads.experiment == "tiny" and threads.key.startswith("tiny-tp1cp1dp1-")  # same bits are due: compared with the others
    assert rate.experiment.startswith("tiny-") and rate.key.startswith("tiny-tp1cp1dp1-")
    assert compose.compose_run(["optimizer.lr=0.25"]).key != rate.key
    assert compose.compose_run(["checkpoint.seed=1"]).config.checkpoint.name.startswith("tiny-")  # another folder
    assert compose.compose_run(["data.reward=exact"]).config.data.name == "arithmetic"  # the same prompts


# --- mistakes ----------------------------------------------------------------------------------------------------------------
BAD = [
    (["optimizer.lrr=1"], "optimizer.lrr: unknown key; did you mean optimizer.lr?"),
    (["+layout.pp=2"], "layout.pp: unknown key; did you mean layout.tp?"),
    (["optimizer.lr=fast"], "optimizer.lr: value 'fast' of type 'str' could not be converted to Float"),
    (["layout.tp=two"], "layout.tp: value 'two' of type 'str' could not be converted to Integer"),
    (["layout.tp=1,2"], "layout.tp=1,2: several values need -m"),
    (["iterations=0"], "iterations=0: must be 1 or more"),
    (["experiment=nano"], f"experiment=nano: no such choice; use {', '.join(EXPERIMENTS)}"),
    (["two words"], "'two words': can't be read; write key=value, with quotes around special characters"),
    (["checkpoint.name=???"], "checkpoint.name: is missing; give it on the command line or in conf/"),
    (["name=a.b"], "name='a.b': use letters, digits, _ and - only"),
    (["seed=-1"], "seed=-1: must be 0 or more"),
    (
        ["experiment=smollm2", "layout=tp2"],
        "layout.tp=2: does not divide the 9 heads and 3 KV heads of checkpoint smollm2_135m; use 1 or 3",
    ),
    (["layout.rollout.tp=5"], "layout.rollout.tp=5: does not divide the 24 heads and 12 KV heads of checkpoint tiny; use 1, 2, 3, 4 or 6"),
    (
        ["layout.tp=12"],
        "layout.tp=12: tiny has only 10 leaves to share in feed-forward or vocabulary; use 1, 2, 3, 4 or 6, "
        "or smaller numerics.k_leaf and numerics.vocab_leaf",
    ),
    (["layout.dp=17"], "layout.dp=17: more ranks than the 16 samples of an update can feed; use 16 or fewer"),
    (
        ["layout.dp=16", "layout.rollout.dp=17"],
        "layout.rollout.dp=17: more ranks than the 16 samples of an iteration can feed; use 16 or fewer",
    ),
    (["layout.cp=65"], "layout.cp=65: more ranks than the 64 token tiles of numerics.token_leaf=8"),
    (["layout.zero=4"], "layout.zero=4: must be a ZeRO stage, 0 to 3"),
    (["layout.micro_batch=-1"], "layout.micro_batch=-1: must be 0 or more"),
    (["objective.num_updates=3"], "objective.num_updates=3: must divide sampling.prompts_per_iteration=4; use 1, 2 or 4"),
    (["objective.kl_type=k4"], "objective.kl_type=k4: must be k1 | k2 | k3"),
    (["kernels.case=R"], "kernels.case=R: must be R/R | P/P | P/R | R/P"),
    (["kernels.ffn=R"], "kernels.ffn=R: must be R/R | P/P | P/R | R/P"),
    (["sampling.temperature=-1"], "sampling.temperature=-1.0: must be 0 or more"),
    (["sampling.top_p=0"], "sampling.top_p=0.0: must be above 0 and at most 1 (1 = off)"),
    (["optimizer.betas=[0.9]"], "optimizer.betas=[0.9]: must be two numbers, each 0 or more and below 1"),
    (["optimizer.lr=nan"], "optimizer.lr=nan: must be 0 or more"),
    (["checkpoint.seed=null"], "checkpoint.seed=null: source seeded needs seed and architecture"),
    (["checkpoint.sha256=12"], "checkpoint.sha256=12: must be 64 lower-case hex digits (null = not checked)"),
    (
        ["checkpoint=qwen3_0_6b", "checkpoint.revision=main"],
        "checkpoint.revision=main: must be a full commit hash (40 hex digits); a branch or tag can move",
    ),
    (["data=jsonl"], "data.path=null: source jsonl needs a file with one JSON object a line"),
]


@pytest.mark.parametrize("overrides, message", BAD, ids=[case[0][-1] for case in BAD])
def test_a_mistake_is_one_line(overrides, message):
    with pytest.raises(UserError) as error:
        compose.compose_run(overrides)
    assert str(error.value) == message
    assert error.value.exit_code == 2


def test_the_command_ends_with_the_message_and_writes_nothing():
    params = (ROOT / "params.yaml").read_bytes()
    unknown = run_command("optimizer.lrr=1")
    assert (unknown.returncode, unknown.stdout, unknown.stderr) == (
        2,
        "",
        "error: optimizer.lrr: unknown key; did you mean optimizer.lr?\n",
    )
    sweep = run_command("-m", "layout=tp2,cp99,cp98")  # two of three are wrong: both are named, none is registered
    messages = [f"error: layout.cp={n}: more ranks than the 64 token tiles of numerics.token_leaf=8" for n in (98, 99)]
    assert (sweep.returncode, sweep.stdout, sorted(sweep.stderr.splitlines())) == (2, "", messages)
    assert (ROOT / "params.yaml").read_bytes() == params
    assert not any((ROOT / name).exists() for name in ("outputs", "multirun", "multirun.yaml", ".hydra"))  # Hydra's own habits


def test_a_missing_compiler_is_a_missing_prerequisite(monkeypatch):
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    monkeypatch.delenv("LOCKSTEP_CXX", raising=False)
    with pytest.raises(MissingPrerequisite, match=r"^compiler: no g\+\+, clang\+\+ or ziglang .* install one") as error:
        checks.compiler_present()
    assert error.value.exit_code == 4


def test_the_processor_must_run_the_kernel_build(monkeypatch):
    from kernels.cpu import build

    assert {name: flags for name, flags in build._CPU_FLAGS.items() if flags} == checks.CPU_FLAGS
    monkeypatch.setattr(checks, "_cpu_flags", lambda: {"avx2", "fma"})
    checks.compiler_present("avx2")
    with pytest.raises(UserError, match="launch.kernel_build=avx512: this processor lacks avx512bw, .*; use auto"):
        checks.compiler_present("avx512")


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"prompt": "1+1=", "answer": "2"}\n\n', "line 2 is empty"),
        ('{"prompt": "1+1=", "answer": "2"}\n{"prompt"\n', "line 2 is not JSON"),
        ('["1+1=", "2"]\n', "line 1 is not a JSON object"),
        ('{"prompt": "1+1="}\n', 'line 1 has no text under "answer"'),
        ('{"prompt": " ", "answer": 2}\n', 'line 1 has no text under "prompt"'),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, message):
    path = tmp_path / "my.jsonl"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        source_checks.check_data(config.Data(name="jsonl", source="jsonl", num_prompts=1, path=str(path)), ROOT)
    example = '{"prompt": "...", "answer": "..."}'
    assert str(error.value) == f"data.path={path}: {message}; write {example}, one a line"


def test_jsonl_files_that_are_missing_short_or_good(tmp_path):
    data = config.Data(name="jsonl", source="jsonl", num_prompts=2, path="my.jsonl")
    with pytest.raises(MissingPrerequisite, match="^data.path=my.jsonl: no such file"):
        source_checks.check_data(data, tmp_path)
    (tmp_path / "my.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\n')
    with pytest.raises(UserError, match="^data.num_prompts=2: my.jsonl has only 1;"):
        source_checks.check_data(data, tmp_path)
    source_checks.check_data(replace(data, num_prompts=1), tmp_path)


def test_local_checkpoints(tmp_path):
    checkpoint = config.Checkpoint(name="mine", source="local", repo="model")
    with pytest.raises(MissingPrerequisite, match="^checkpoint.repo=model: no such folder"):
        source_checks.check_checkpoint(checkpoint, tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/pytorch_model.bin").touch()
    with pytest.raises(UserError, match="^checkpoint.repo=model: is a pickle checkpoint, which can run code; convert it to safetensors$"):
        source_checks.check_checkpoint(checkpoint, tmp_path)
    (tmp_path / "model/model.safetensors").touch()
    with pytest.raises(UserError, match="^checkpoint.repo=model: holds no config.json"):
        source_checks.check_checkpoint(checkpoint, tmp_path)
    (tmp_path / "model/config.json").write_text("{}")
    source_checks.check_checkpoint(checkpoint, tmp_path)
    with pytest.raises(UserError, match="^checkpoint.sha256=0{64}: model/model.safetensors has e3b0c442"):
        source_checks.check_checkpoint(replace(checkpoint, sha256="0" * 64), tmp_path)


def test_a_missing_field_of_the_architecture_is_named():
    cfg = compose.compose_run([]).config
    del cfg.checkpoint.architecture["hidden_size"]  # type: ignore[index]
    with pytest.raises(UserError, match="^checkpoint.architecture.hidden_size: is missing"):
        checks.check(cfg, Path("/"))

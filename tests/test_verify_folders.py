"""Reports against the folders they were made from: what only the files can show, and that nothing in a name leads out of them."""

from __future__ import annotations

import copy
import json
import os
import shutil

import numpy as np
import pytest
from omegaconf import OmegaConf
from synthetic_runs import edit_arrays, edit_json
from verified_runs import make_project, report_of

from pipeline.paths import ROOT
from pipeline.verify import document, registry
from pipeline.verify.command import main
from pipeline.verify.folder_checks import check_folders, check_project
from pipeline.verify.report import verify

KEYS = ("tiny-tp1cp1dp1", "tiny-tp2")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(project folder, its report)."""
    synthetic = make_project(tmp_path_factory.mktemp("project"))
    return synthetic.paths.root, report_of(synthetic)


@pytest.fixture
def project(made, tmp_path):
    """A copy that may be damaged."""
    shutil.copytree(made[0], tmp_path / "project")
    return tmp_path / "project"


def faults(report, root) -> list[str]:
    checks = verify(report)
    check_project(report, root, checks)
    return checks.faults


def test_a_report_and_its_project_agree(made):
    root, report = made
    checks = verify(report)
    before = checks.count
    check_project(report, root, checks)
    assert checks.faults == [] and checks.count > before + 300
    assert checks.notes == ["train/grad_norm, gradients, moments and weights as results of training: gradients are stored as hashes only"]


def test_several_updates_an_iteration(tmp_path):
    synthetic = make_project(tmp_path, num_updates=2)
    report = report_of(synthetic)
    assert report["runs"][0]["steps"]["1"]["train/ppo_kl"] != 0
    assert faults(report, tmp_path) == []


def ulp(name, index):
    def change(arrays):
        arrays[name].reshape(-1)[index : index + 1].view(np.uint32)[:] += 1

    return change


ARRAYS = {
    "i0002/rollout/completions.safetensors": ("tokens", 7, "iteration 2, tokens: tokens[7] differs from that of tiny-tp1cp1dp1"),
    "i0001/ref_logprob/ref.safetensors": ("logprobs", 4, "iteration 1, reference_logprob: logprobs[4]"),
    "i0001/train/logprobs.safetensors": ("current", 3, "iteration 1, current_logprob: logprobs[3]"),
    "state/state_v000002/exp_avg_sq.safetensors": ("model.norm.weight", 1, "iteration 1, exp_avg_sq: model.norm.weight[1]"),
    "weights/weight_v000003/model.safetensors": ("model.embed_tokens.weight", 9, "iteration 2, weights: model.embed_tokens.weight[2, 1]"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_one_changed_bit_is_named(made, project, name):
    tensor, index, place = ARRAYS[name]
    edit_arrays(project / "runs" / KEYS[1] / name, ulp(tensor, index))
    found = faults(made[1], project)
    assert any(place in fault for fault in found), found
    assert any("the files' result digest is" in fault for fault in found)


def test_a_tensor_is_named_without_another_run_too(made, project):
    edit_arrays(project / "runs" / KEYS[1] / "weights/weight_v000002/model.safetensors", ulp("model.norm.weight", 0))
    checks = verify(made[1])
    check_folders(made[1], [project / "runs" / KEYS[1]], checks)
    assert any("iteration 1, weights: model.norm.weight: the bytes are not those" in fault for fault in checks.faults), checks.faults


def test_a_changed_metric_is_named(made, project):
    edit_json(project / "runs" / KEYS[0] / "i0002/train/metrics.json", lambda m: m["1"].update({"train/kl_loss": 0.5}))
    assert any("iteration 2, step 1, metrics: train/kl_loss" in fault for fault in faults(made[1], project))


def test_one_changed_byte_of_any_file_of_a_run_is_refused(made, project):
    report = made[1]
    for path in sorted((project / "runs" / KEYS[1]).rglob("*")) + [project / "runs/checkpoints/tiny/model.safetensors"]:
        if path.is_file():
            data = path.read_bytes()
            path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
            assert faults(report, project), path
            path.write_bytes(data)
    assert not faults(report, project)


def test_a_missing_file_is_named(made, project):
    (project / "runs" / KEYS[1] / "i0002/sidecars/rank00001.call00000000.safetensors").unlink()
    (project / "runs" / KEYS[0] / "state/state_v000003/exp_avg.safetensors").unlink()
    found = faults(made[1], project)
    assert any("i0002/sidecars: " in fault and "not in exactly 2 files" in fault for fault in found)
    assert any("state/state_v000003/exp_avg.safetensors: is missing" in fault for fault in found)
    shutil.rmtree(project / "runs" / KEYS[1])
    assert any(f"runs/{KEYS[1]}: is missing" in fault for fault in faults(made[1], project))


# --- forgeries ---------------------------------------------------------------------------------------------------------------
def rehash(report):
    """Every digest of the report again, as a forger does who knows the definitions."""
    for run in report["runs"]:
        previous = None
        for element in run["chain"]:
            element["previous"] = previous
            previous = element["digest"] = document.sha256({key: value for key, value in element.items() if key != "digest"})
        run["result_digest"] = run["validation"]["file_hashes"]["result_digest"] = previous
    report["result_digest"] = report["runs"][0]["result_digest"]


def forge_weights(report):
    report["all_parameter_hash_comparisons"][2]["sha256"] = ["ab" * 32] * 2
    for run in report["runs"]:
        run["chain"][2]["quantities"]["weights"] = "ab" * 32


def forge_norm(report):
    norm = 0.25
    row = report["gradient_norm_comparisons"][1]
    row["norms"], row["hex"] = [norm] * 2, [norm.hex()] * 2
    for run in report["runs"]:
        run["steps"]["1"]["train/grad_norm"] = norm
        run["chain"][2]["steps"]["1"]["gradient_norm"] = document.sha256({"train/grad_norm": norm.hex()})


def forge_reward(report):
    for run in report["runs"]:
        m = run["steps"]["1"]
        m["rollout/reward_mean"] = 0.75
        values = {name: value.hex() for name, value in m.items() if name.startswith("rollout/")}
        run["chain"][2]["quantities"]["rollout_metrics"] = document.sha256(values)


FORGERIES = {
    "weights": (forge_weights, "iteration 2, weights"),
    "norm": (forge_norm, "iteration 2, step 1, gradient_norm: train/grad_norm"),
    "reward": (forge_reward, "iteration 2, rollout_metrics: rollout/reward_mean"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_coherent_forgery_passes_alone_and_is_caught_by_the_files(made, name):
    root, report = made
    forge, place = FORGERIES[name]
    forged = copy.deepcopy(report)
    forge(forged)
    assert verify(forged).faults
    rehash(forged)
    assert verify(forged).faults == []  # why a report alone is no proof
    assert any(place in fault for fault in faults(forged, root)), faults(forged, root)


def test_a_run_that_is_another_runs_copy_is_caught(made, project):
    """One run copied under the name of a second: its readbacks and sidecars are not those of the second layout."""
    shutil.rmtree(project / "runs" / KEYS[1])
    shutil.copytree(project / "runs" / KEYS[0], project / "runs" / KEYS[1])
    assert any("readbacks" in fault for fault in faults(made[1], project))


# --- names and links ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["tiny-../tp2", "tiny-/etc/tp2", "tiny-tp2\\u0000", "tiny-tp2/.", ".."])
def test_no_name_leads_out_of_the_folder(made, name):
    root, report = made
    found = faults(json.loads(json.dumps(report).replace(KEYS[1], name)), root)
    assert any("is no plain name" in fault for fault in found), found


@pytest.mark.parametrize("name", ["runs", f"runs/{KEYS[1]}", f"runs/{KEYS[1]}/i0001/train", f"runs/{KEYS[1]}/i0001/train/metrics.json"])
def test_symbolic_links_are_refused_wherever_they_lead(made, project, name):
    (project / name).rename(project / "elsewhere")
    os.symlink(project / "elsewhere", project / name)
    found = faults(made[1], project)
    assert any(f"{name}: is a symbolic link" in fault for fault in found), found


def test_a_pipe_blocks_nobody(made, project):
    path = project / "runs" / KEYS[1] / "i0001/train/metrics.json"
    path.unlink()
    os.mkfifo(path)
    assert any("metrics.json: is no regular file" in fault for fault in faults(made[1], project))


HEADERS = (
    b"{}",
    b'{"a":1}',
    b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}',
)


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, *(len(h).to_bytes(8, "little") + h + bytes(4) for h in HEADERS)])
def test_damaged_tensor_files_are_one_fault_each(made, project, data):
    (project / "runs" / KEYS[1] / "weights/weight_v000002/model.safetensors").write_bytes(data)
    found = faults(made[1], project)
    assert sum("weight_v000002/model.safetensors: " in fault for fault in found) == 1, found


# --- params.yaml -------------------------------------------------------------------------------------------------------------
def test_the_registry_is_read_as_omegaconf_reads_it(made):
    for path in (ROOT / "params.yaml", made[0] / "params.yaml"):
        content = registry.parse(path.read_text())
        assert content == OmegaConf.to_container(OmegaConf.load(path))
        for group in content["experiments"].values():
            assert {registry.experiment_digest(content["runs"][key]) for key in group["runs"]} == {group["digest"]}


FOREIGN = (
    "a: {b: 1}", "a: &x 1", "a: |\n  b", "a:\n  - - 1", "a: 1\na: 2", "a: 'it's'", "\ta: 1", "a:\nb: 1", "a: [1]", "a: 1\n  b: 2",
    "a: b\n  c", "a: # b", "- a: 1",
)  # fmt: skip


@pytest.mark.parametrize("text", FOREIGN)
def test_what_omegaconf_does_not_write_is_refused(text):
    with pytest.raises(ValueError, match="line 1|line 2"):
        registry.parse(text)


def test_a_changed_configuration_is_found(made, project):
    text = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(text.replace("kl_coef: 0.01", "kl_coef: 0.02"))
    found = faults(made[1], project)
    assert any("experiment_digest" in fault for fault in found) and any("train/loss of step" in fault for fault in found)


# --- the command -------------------------------------------------------------------------------------------------------------
def test_exit_status_with_folders(made, project, capsys):
    path = project / "reports/tiny/comparison.json"
    assert main([str(path), "--root", str(project)]) == 0
    assert main([str(path), "--run", str(project / "runs" / KEYS[0])]) == 0
    assert "version 1 of the weights" in capsys.readouterr().out
    assert main([str(path), "--run", str(project)]) == 2
    assert main([str(path), "--root", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 2 and "is no folder of a run of the report" in err and "holds runs/" in err
    edit_json(project / "runs" / KEYS[0] / "i0001/train/metrics.json", lambda m: m["0"].update({"train/loss": "NaN"}))
    assert main([str(path), "--root", str(project)]) == 3

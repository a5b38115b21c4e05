"""A good run passes; each fault, injected alone, is found and named."""

from __future__ import annotations

import shutil

import jsonschema
import numpy as np
import pytest
from safetensors.numpy import load_file
from synthetic_runs import LAYOUTS, edit_arrays, edit_json, make_experiment, parameters, save, write_sidecars

from pipeline.config import Layout, RolloutLayout
from pipeline.evidence.readbacks import decode_steps, expected_counts
from pipeline.evidence.run_summary import read_samples
from pipeline.evidence.sidecars import differences
from pipeline.evidence.validation import check_schema, validate
from pipeline.layout import MeshShape
from stages import validate as stage

KEY = "tiny-cp2dp2"


@pytest.fixture
def experiment(tmp_path):
    return make_experiment(tmp_path, {"cp2dp2": LAYOUTS["cp2dp2"]})


def record_of(experiment, key=KEY):
    record = validate(experiment.configs[key], experiment.files(key))
    check_schema("validation", record)
    return record


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("num_updates", [1, 2])
def test_a_good_run_passes_in_every_layout(tmp_path, name, num_updates):
    experiment = make_experiment(tmp_path, {name: LAYOUTS[name]}, num_updates=num_updates)
    record = stage.run(experiment.configs[f"tiny-{name}"], f"tiny-{name}", experiment.paths, tmp_path / "validation.json")
    assert record["errors"] == [] and record["passed"]
    logprob = record["train_rollout_logprob"]
    assert (logprob["element_count"], logprob["mismatch_count"], logprob["bitwise_equal"]) == (26, 0, True)
    assert logprob["mismatch_kl"] == logprob["mismatch_k3_kl"] == 0 and str(logprob["mismatch_kl"]) == "0.0"
    assert record["runtime_scalar_logprob"]["total_active_token_exposure"] == 26
    assert record["cudagraph"]["applicable"] is False and "passed" not in record["cudagraph"]
    assert str(tmp_path) not in (tmp_path / "validation.json").read_text()


def readback(experiment, stage_name, rank=0, iteration=1):
    return experiment.files(KEY).iteration(iteration) / "readbacks" / stage_name / f"rank{rank:05d}.json"


def module(name, field, value):
    return lambda content: content["modules"][name].update({field: value})


READBACK_FAULTS = {
    "fallback": ("train", module("attention", "implementation", "torch"), "attention ran torch, case R/R asks for lockstep"),
    "rollout fallback": ("rollout", module("logp", "implementation", "torch"), "logp ran torch, case R/R asks for lockstep"),
    "call count": ("train", module("ffn", "call_count", 7), "ffn.call_count is 7, expected 8"),
    "missing module": ("ref_logprob", lambda content: content["modules"].pop("ffn"), "module ffn is missing"),
    "forwards": ("rollout", lambda content: content["counts"].update(forwards=1), "counts.forwards is 1, expected"),
    "backwards": ("train", lambda content: content["counts"].update(backwards=0), "counts.backwards is 0, expected 2"),
    "mesh": ("train", lambda content: content.update(mesh=[0, 1, 1]), "mesh is [0, 1, 1], expected [0, 0, 0]"),
    "side": ("train", lambda content: content.update(side="rollout"), "side is rollout, expected training"),
    "another build": ("train", lambda content: content.update(kernel_build="cpu.scalar"), "several kernel builds: cpu.avx2, cpu.scalar"),
    "another backend": ("train", module("logp", "backend_id", "x"), "several logp backends: lockstep.linear_logp.tree.v1, x"),
    "an unknown build": (
        "train",
        lambda content: content.update(kernel_build="cpu.avx3"),
        "kernel_build is cpu.avx3, expected cpu.avx512 or",
    ),
    "an unknown backend": ("ref_logprob", module("ffn", "backend_id", "y"), "ffn.backend_id is y, expected lockstep.ffn.tree.v1"),
    "another torch": (
        "rollout",
        lambda content: content.update(versions={"torch": "1.0"}),
        "ranks ran several versions of torch: 1.0, 2.0",
    ),
    "no readback": ("train", lambda content: content.clear(), "not a readback"),
}


@pytest.mark.parametrize("fault", READBACK_FAULTS)
def test_readback_faults_are_named(experiment, fault):
    stage_name, change, message = READBACK_FAULTS[fault]
    edit_json(readback(experiment, stage_name), change)
    record = record_of(experiment)
    assert not record["passed"] and not record["runtime_readbacks"]["passed"]
    assert any(message in error for error in record["errors"]), record["errors"]


def test_a_missing_and_a_surplus_rank_are_named(experiment):
    readback(experiment, "train", rank=3).rename(readback(experiment, "train", rank=4))
    errors = record_of(experiment)["errors"]
    assert "i0001/readbacks/train/rank00003.json: readback is missing" in errors
    assert any("rank00004.json: readback of a rank that the layout doesn't have" in e for e in errors)


def sidecar(experiment, rank=0, call=0):
    return experiment.files(KEY).iteration(1) / "sidecars" / f"rank{rank:05d}.call{call:08d}.safetensors"


def minus_zero(arrays):
    at = int(np.flatnonzero(arrays["old"] == 0)[0])
    arrays["old"][at] = np.float32(-0.0)


def one_ulp(arrays):
    arrays["current"][0] = np.nextafter(arrays["current"][0], np.float32(1))


SIDECAR_FAULTS = {
    "+0 and -0": (minus_zero, "1 old logprobs differ from the iteration's (slot 2: 0x80000000 (-0.0) against 0x00000000 (0.0))"),
    "one ulp": (one_ulp, "1 current logprobs differ"),
    "token left out": (lambda a: a.update({k: v[1:] for k, v in a.items()}), "1 response tokens are not in exactly 1 sidecars"),
    "token twice": (lambda a: a.update({k: np.concatenate([v, v[:1]]) for k, v in a.items()}), "(the first: slot 0, in 2)"),
    "slot outside": (lambda a: a["slots"].__setitem__(0, 99), "slot outside 0..12"),
    "no slots": (lambda a: a.pop("slots"), "no slots"),
    "fp64": (lambda a: a.update(old=a["old"].astype(np.float64)), "must be fp32"),
}


@pytest.mark.parametrize("fault", SIDECAR_FAULTS)
def test_sidecar_faults_are_named(experiment, fault):
    change, message = SIDECAR_FAULTS[fault]
    edit_arrays(sidecar(experiment), change)
    record = record_of(experiment)
    assert not record["passed"]
    assert any(message in error for error in record["errors"]), record["errors"]


def test_missing_surplus_and_damaged_sidecars_are_named(experiment):
    sidecar(experiment, 1).unlink()
    shutil.copy(sidecar(experiment, 0), sidecar(experiment, 9))
    sidecar(experiment, 2).write_bytes(b"damaged")
    record = record_of(experiment)
    errors = "\n".join(record["errors"])
    assert "rank00001.call00000000.safetensors: sidecar is missing" in errors
    assert "rank00009.call00000000.safetensors: sidecar of a rank or call that the layout doesn't have" in errors
    assert "rank00002.call00000000.safetensors: " in errors
    offline = record["offline_tensor_comparison"]
    assert offline["artifact_count"] - offline["comparable_artifact_count"] == 1


def test_rollout_and_trainer_must_agree_on_every_bit(experiment):
    files = experiment.files(KEY)
    path = files.iteration(1) / "train" / "logprobs.safetensors"
    edit_arrays(path, lambda a: a["old"].__setitem__(1, np.nextafter(a["old"][1], np.float32(-9))))
    write_sidecars(files, experiment.configs[KEY], 1)
    record = record_of(experiment)
    logprob = record["train_rollout_logprob"]
    assert (logprob["mismatch_count"], logprob["bitwise_equal"], logprob["torch_equal"]) == (1, False, False)
    assert logprob["max_abs_diff"] > 0 and logprob["mismatch_kl"] > 0
    errors = "\n".join(record["errors"])
    assert "1 of 26 old logprobs differ in bits from the rollout's" in errors
    assert "1 of 26 current logprobs differ in bits from the old ones" in errors
    assert "hashes.json: sha256 of 1 tensors is not the hash of the stored bytes (the first: old)" in errors


def test_a_zero_of_the_other_sign_is_a_mismatch_that_values_do_not_show(experiment):
    files = experiment.files(KEY)
    for name in ("old", "current"):
        edit_arrays(files.iteration(1) / "train" / "logprobs.safetensors", lambda a, name=name: a[name].__setitem__(2, np.float32(-0.0)))
    write_sidecars(files, experiment.configs[KEY], 1)
    logprob = record_of(experiment)["train_rollout_logprob"]
    assert (logprob["mismatch_count"], logprob["torch_equal"], logprob["max_abs_diff"]) == (1, True, 0.0)


def test_the_trainers_own_counts_are_held_against_the_arrays(experiment):
    path = experiment.files(KEY).iteration(2) / "train" / "metrics.json"
    edit_json(path, lambda m: m["1"].update({"train/train_current_rollout_logprob_mismatch_count": 2.0}))
    record = record_of(experiment)
    assert record["runtime_scalar_logprob"]["bitwise_zero"] is False
    assert "i0002: the trainer counted 2 mismatches of current and rollout logprobs, the stored arrays have 0" in record["errors"]


FILE_FAULTS = {
    "weights": (
        "weights/weight_v000002/model.safetensors",
        lambda a: a["model.norm.weight"].__setitem__(0, 7),
        "(the first: model.norm.weight)",
    ),
    "moment": ("state/state_v000003/exp_avg.safetensors", lambda a: a["model.norm.weight"].__setitem__(0, 7), "exp_avg/model.norm.weight"),
    "tokens": ("i0001/rollout/completions.safetensors", lambda a: a["tokens"].__setitem__(0, 3), "tokens_sha256"),
    "samples": ("i0001/rollout/completions.safetensors", lambda a: a.update(rewards=a["rewards"][:3]), "number of samples in rewards is 3"),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_bytes_are_held_against_the_recorded_hashes(experiment, fault):
    name, change, message = FILE_FAULTS[fault]
    edit_arrays(experiment.files(KEY).paths.run(KEY) / name, change)
    errors = record_of(experiment)["errors"]
    assert any(message in error for error in errors), errors


@pytest.mark.parametrize(
    "name",
    [
        "i0002/train/metrics.json",
        "i0002/train/hashes.json",
        "i0001/train/logprobs.safetensors",
        "i0001/ref_logprob/ref.safetensors",
        "i0001/rollout/completions.safetensors",
        "i0001/rollout/summary.json",
        "weights/weight_v000003/model.safetensors",
        "weights/weight_v000003/tensors.json",
        "state/state_v000002/exp_avg_sq.safetensors",
        "state/state_v000002/step.json",
    ],
)
def test_a_missing_file_is_named(experiment, name):
    (experiment.files(KEY).paths.run(KEY) / name).unlink()
    errors = record_of(experiment)["errors"]
    assert any(name in error for error in errors), errors


def test_a_missing_step_is_named(experiment):
    path = experiment.files(KEY).iteration(2) / "train" / "metrics.json"
    edit_json(path, lambda m: m.pop("1"))
    errors = "\n".join(record_of(experiment)["errors"])
    assert "i0002: optimizer steps in metrics.json is [], expected ['1']" in errors


def test_a_run_with_ordinary_kernels_must_say_so(tmp_path):
    experiment = make_experiment(tmp_path, {"cp2dp2": LAYOUTS["cp2dp2"]}, case="P/R")
    assert record_of(experiment)["passed"]
    edit_json(readback(experiment, "train"), module("ffn", "implementation", "lockstep"))
    assert any("ffn ran lockstep, case P/R asks for torch" in error for error in record_of(experiment)["errors"])


def test_a_hash_of_the_checkpoint_is_checked_too(experiment):
    save(experiment.files(KEY).checkpoint_folder / "model.safetensors", parameters(5))
    errors = record_of(experiment)["errors"]
    assert any("runs/checkpoints/tiny/tensors.json" in error for error in errors), errors


def test_decode_steps_replays_continuous_batching():
    assert decode_steps([3, 5, 1, 4], 8) == 5
    assert decode_steps([3, 5, 1, 4], 2) == 8  # slots: 3 + 1 + 4, 5
    assert decode_steps([3, 5, 1, 4], 1) == 13
    assert decode_steps([], 4) == 0


def test_expected_counts_by_hand():
    layout = Layout(tp=1, cp=2, dp=2, micro_batch=1, rollout=RolloutLayout(tp=2, dp=3, batch_size=1))
    lengths = [3, 5, 1, 4, 2]  # data-parallel ranks hold 2 and 3 samples, rollout ranks 1, 2 and 2
    assert expected_counts(layout, "train", lengths, 1) == [(6, 3)] * 4
    assert expected_counts(layout, "ref_logprob", lengths, 1) == [(3, 0)] * 4
    rollout = expected_counts(layout, "rollout", lengths, 1)
    assert rollout == [(n, 0) for n in (3, 3, 6, 6, 6, 6)] and len(rollout) == MeshShape(2, 1, 3).world_size


def test_divergence_estimates():
    old, rollout = np.array([-1.0, -2.0], dtype=np.float32), np.array([-1.5, -2.0], dtype=np.float32)
    found = differences(old, rollout)
    assert found["mismatch_kl"] == -0.25 and found["train_rollout_logprob_abs_diff"] == 0.25 and found["max_abs_diff"] == 0.5
    assert found["mismatch_k3_kl"] == pytest.approx((np.e**0.5 - 1.5) / 2)
    assert np.isnan(differences(np.array([-np.inf], dtype=np.float32), np.array([-np.inf], dtype=np.float32))["mismatch_kl"])


def test_the_schema_refuses_a_record_that_passes_with_errors(experiment):
    record = record_of(experiment)
    with pytest.raises(jsonschema.ValidationError):
        check_schema("validation", {**record, "errors": ["x"]})
    with pytest.raises(jsonschema.ValidationError):
        check_schema("validation", {**record, "cudagraph": {"applicable": False, "reason": "", "passed": True}})


def test_tensor_parallel_ranks_hold_the_same_tokens(tmp_path):
    experiment = make_experiment(tmp_path, {"tp2": LAYOUTS["tp2"]})
    folder = experiment.files("tiny-tp2").iteration(1) / "sidecars"
    assert load_file(folder / "rank00000.call00000000.safetensors").keys() == {"slots", "rollout", "old", "current"}
    edit_arrays(folder / "rank00001.call00000000.safetensors", lambda a: a.update({k: v[:0] for k, v in a.items()}))
    assert any("are not in exactly 2 sidecars" in e for e in record_of(experiment, "tiny-tp2")["errors"])


def test_changed_text_and_model_files_are_named(experiment):
    files = experiment.files(KEY)
    with (files.iteration(1) / "rollout" / "completions.jsonl").open("a") as file:
        file.write(" ")
    edit_json(files.weights(2) / "config.json", lambda content: content.update(vocab_size=1))
    edit_json(files.state(2) / "tensors.json", lambda content: content.update(digest="0"))
    errors = record_of(experiment)["errors"]
    assert any("sha256 of completions.jsonl is" in e for e in errors)
    assert any("weight_v000002/config.json: is not the checkpoint's config.json" in e for e in errors)
    assert any("state_v000002/tensors.json: digest is not that of its sha256" in e for e in errors)


def test_another_build_than_asked_for_is_named(experiment):
    experiment.configs[KEY].launch.kernel_build = "avx512"
    assert any("kernel_build is cpu.avx2, expected cpu.avx512" in e for e in record_of(experiment)["errors"])


def test_a_rollout_whose_header_lost_an_array_is_named(experiment):
    path = experiment.files(KEY).iteration(1) / "rollout" / "completions.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"prompt_lengths"', b'"qrompt_lengths"'))
    assert any("has no prompt_lengths" in e for e in record_of(experiment)["errors"])
    assert list(read_samples(experiment.files(KEY))) == [2]

"""Equal runs are called identical with one digest; one injected difference is found: first place, tensor, index, both values."""

from __future__ import annotations

import jsonschema
import numpy as np
import pytest
from synthetic_runs import LAYOUTS, edit_arrays, edit_json, make_experiment, validate_all

from pipeline.config import Layout
from pipeline.digest import read_json, sha256_tensor
from pipeline.evidence.chain import chain_digest, read_evidence
from pipeline.evidence.compare import ExperimentId, RunRecord, compare, summary_line
from pipeline.evidence.performance import forward_flops
from pipeline.evidence.validation import check_schema, validate
from pipeline.layout import ModelShape
from stages import compare as stage

ORACLE, OTHER = "tiny-tp1cp1dp1", "tiny-tp2"


@pytest.fixture
def experiment(tmp_path):
    return make_experiment(tmp_path)


def comparison_of(experiment, expected=None):
    runs = [RunRecord(experiment.files(k), validate(cfg, experiment.files(k)), {}, {}) for k, cfg in experiment.configs.items()]
    record = compare(runs, ExperimentId("tiny", experiment.digest, "R/R", expected))
    check_schema("comparison", record)
    return record


def test_equal_runs_are_identical(experiment):
    record = comparison_of(experiment)
    assert (record["verdict"], record["reasons"], record["first_difference"]) == ("identical", [], None)
    assert record["oracle"] == ORACLE and record["tokens_equal"]
    assert {run["result_digest"] for run in record["runs"]} == {record["result_digest"]}
    assert [row["version"] for row in record["all_parameter_hash_comparisons"]] == [f"weight_v00000{i}" for i in (1, 2, 3)]
    for name in ("all_parameter_hash_comparisons", "gradient_hash_comparisons", "adam_state_comparisons", "logprob_comparisons"):
        assert record[name] and all(row["bitwise_equal"] for row in record[name]), name
    assert [row["step"] for row in record["metric_comparisons"]] == [None, 0, None, 1]
    assert all(row["exactly_equal"] and len(row["norms"]) == 3 for row in record["gradient_norm_comparisons"])
    assert summary_line(record) == f"identical: 3 layouts (tp1cp1dp1, tp2, cp2dp2), result digest {record['result_digest']}"


def test_result_digest_can_be_recomputed_from_the_report(experiment):
    record = comparison_of(experiment)
    for run in record["runs"]:
        for before, element in zip([None, *run["chain"]], run["chain"]):
            assert element["digest"] == chain_digest(element)
            assert element["previous"] == (before["digest"] if before else None)
        assert run["chain"][-1]["digest"] == run["result_digest"]


def test_result_digest_depends_on_no_layout_and_no_folder(tmp_path):
    digests = set()
    for name, layout in {**LAYOUTS, "tp3dp2": Layout(tp=3, dp=2, micro_batch=1)}.items():
        digests.add(comparison_of(make_experiment(tmp_path / name, {name: layout}))["result_digest"])
    assert len(digests) == 1


def test_one_run_alone_proves_nothing(tmp_path):
    record = comparison_of(make_experiment(tmp_path, {"tp2": LAYOUTS["tp2"]}))
    assert record["verdict"] == "alone" and record["oracle"] == OTHER and summary_line(record).startswith("alone: one layout (tp2)")
    with pytest.raises(ValueError, match="no runs"):
        compare([], ExperimentId("tiny", "0" * 64, "R/R"))


def test_the_golden_digest_is_held(experiment):
    golden = comparison_of(experiment)["result_digest"]
    assert comparison_of(experiment, golden)["verdict"] == "identical"
    record = comparison_of(experiment, "0" * 64)
    assert record["verdict"] == "different" and "is expected" in record["reasons"][0]


def add_ulp(name, index):
    def change(arrays):
        arrays[name].reshape(-1)[index : index + 1].view(np.uint32)[:] += 1

    return change


def set_to(name, index, value):
    return lambda arrays: arrays[name].__setitem__(index, value)


# file below the run's folder, change, and what the first difference must say
ARRAY_FAULTS = {
    "token": ("i0002/rollout/completions.safetensors", set_to("tokens", 7, 99), "tokens", "tokens", [7], (1, 2)),
    "finish": ("i0002/rollout/completions.safetensors", set_to("finish", 3, 1), "tokens", "finish", [3], (3, None)),
    "prompt": ("i0001/rollout/completions.safetensors", set_to("prompt_ids", 1, 9), "prompts", "prompt_ids", [1], (1, None)),
    "rollout": ("i0001/rollout/completions.safetensors", add_ulp("logprobs", 4), "rollout_logprob", "logprobs", [4], (1, 1)),
    "reference": ("i0002/ref_logprob/ref.safetensors", add_ulp("logprobs", 12), "reference_logprob", "logprobs", [12], (3, 3)),
    "old": ("i0001/train/logprobs.safetensors", add_ulp("old", 8), "old_logprob", "logprobs", [8], (2, 0)),
    "current": ("i0001/train/logprobs.safetensors", add_ulp("current", 0), "current_logprob", "logprobs", [0], (0, 0)),
    "entropy": ("i0001/train/logprobs.safetensors", add_ulp("entropy", 8), "entropy", "entropy", [8], (2, 0)),
    "reward": ("i0002/rollout/completions.safetensors", set_to("rewards", 2, -0.0), "rewards", "rewards", [2], (2, None)),
    "advantage": ("i0001/train/logprobs.safetensors", add_ulp("advantages", 3), "advantages", "advantages", [3], (1, 0)),
    "weights": (
        "weights/weight_v000003/model.safetensors",
        add_ulp("model.embed_tokens.weight", 9),
        "weights",
        "model.embed_tokens.weight",
        [2, 1],
        None,
    ),
    "first moment": ("state/state_v000002/exp_avg.safetensors", add_ulp("model.norm.weight", 1), "exp_avg", "model.norm.weight", [1], None),
    "second moment": (
        "state/state_v000002/exp_avg_sq.safetensors",
        add_ulp("model.norm.weight", 0),
        "exp_avg_sq",
        "model.norm.weight",
        [0],
        None,
    ),
}


@pytest.mark.parametrize("fault", ARRAY_FAULTS)
def test_one_changed_element_is_found(experiment, fault):
    name, change, quantity, tensor, index, place = ARRAY_FAULTS[fault]
    edit_arrays(experiment.paths.run(OTHER) / name, change)
    record = comparison_of(experiment)
    found = record["first_difference"]
    assert record["verdict"] == "different" and record["result_digest"] is None
    assert (found["quantity"], found["tensor"], found["index"], found["runs"]) == (quantity, tensor, index, [ORACLE, OTHER])
    assert found["values"][0] != found["values"][1] and all(value.startswith("0x") for value in found["values"])
    assert (found["sample"], found["position"]) == (place or (None, None))
    assert found["text"] == record["reasons"][0] and summary_line(record) == f"different: {found['text']}"


def test_one_ulp_is_shown_in_hex(experiment):
    path = "weights/weight_v000002/model.safetensors"
    for key, bits in ((ORACLE, 0), (OTHER, 1), ("tiny-cp2dp2", 0)):
        value = (np.float32(1).view(np.uint32) + np.uint32(bits)).view(np.float32)
        edit_arrays(experiment.paths.run(key) / path, set_to("model.norm.weight", 2, value))
    record = comparison_of(experiment)
    assert record["first_difference"]["text"] == (
        f"iteration 1, weights: model.norm.weight[2] is 0x3f800000 (1.0) in {ORACLE}, 0x3f800001 (1.0000001192092896) in {OTHER}"
    )
    assert record["all_parameter_hash_comparisons"][1]["unequal_parameter_tensors"] == ["model.norm.weight"]


def test_a_changed_metric_is_found(experiment):
    path = experiment.files(OTHER).iteration(2) / "train" / "metrics.json"
    loss = read_json(path)["1"]["train/loss"]
    edit_json(path, lambda m: m["1"].update({"train/loss": float(np.nextafter(loss, 1))}))
    record = comparison_of(experiment)
    found = record["first_difference"]
    assert (found["iteration"], found["step"], found["quantity"], found["tensor"]) == (2, 1, "metrics", "train/loss")
    assert found["values"] == [loss.hex(), float(np.nextafter(loss, 1)).hex()]
    assert record["metric_comparisons"][3]["unequal_metrics"].keys() == {"train/loss"}


def test_a_gradient_is_found_before_the_weights_that_follow_from_it(experiment):
    run = experiment.paths.run(OTHER)
    edit_json(run / "i0001/train/hashes.json", lambda h: h["updates"][0]["gradients"].update({"model.norm.weight": "ab" * 32}))
    edit_json(run / "i0001/train/metrics.json", lambda m: m["0"].update({"train/grad_norm": 0.5}))
    edit_arrays(run / "weights/weight_v000002/model.safetensors", add_ulp("model.norm.weight", 0))
    record = comparison_of(experiment)
    found = record["first_difference"]
    assert (found["quantity"], found["step"], found["tensor"], found["index"]) == ("gradients", 0, "model.norm.weight", None)
    assert found["values"][1] == "ab" * 32 and "sha256 abababababab..." in found["text"]
    assert record["gradient_hash_comparisons"][0]["unequal_gradient_tensors"] == ["model.norm.weight"]
    norm = record["gradient_norm_comparisons"][0]
    assert not norm["exactly_equal"] and norm["relative_difference_percent"] == pytest.approx(80, abs=0.1)


def test_of_several_differences_the_earliest_is_named(experiment):
    edit_arrays(experiment.paths.run(OTHER) / "weights/weight_v000002/model.safetensors", add_ulp("model.norm.weight", 0))
    edit_arrays(experiment.paths.run("tiny-cp2dp2") / "i0001/ref_logprob/ref.safetensors", add_ulp("logprobs", 5))
    found = comparison_of(experiment)["first_difference"]
    assert (found["quantity"], found["runs"]) == ("reference_logprob", [ORACLE, "tiny-cp2dp2"])


def test_swapped_samples_are_a_difference(experiment):
    def swap(arrays):
        arrays["tokens"][:12] = np.concatenate([arrays["tokens"][5:12], arrays["tokens"][:5]])
        arrays["lengths"][[0, 1]] = arrays["lengths"][[1, 0]]

    edit_arrays(experiment.files(OTHER).iteration(1) / "rollout" / "completions.safetensors", swap)
    record = comparison_of(experiment)
    assert record["first_difference"]["quantity"] == "tokens" and not record["tokens_equal"]


@pytest.mark.parametrize("key", [ORACLE, OTHER])
def test_a_missing_file_or_step_is_a_difference_on_either_side(experiment, key):
    edit_json(experiment.files(key).iteration(2) / "train" / "metrics.json", lambda m: m.pop("1"))
    record = comparison_of(experiment)
    found = record["first_difference"]
    assert (found["iteration"], found["quantity"], found["values"][0 if key == ORACLE else 1]) == (2, "metrics", None)
    assert "missing" in found["text"]


def test_another_shape_is_shown_as_such(experiment):
    name = "model.norm.weight"
    edit_arrays(experiment.paths.run(OTHER) / "weights/weight_v000003/model.safetensors", lambda a: a.update({name: a[name][:3].copy()}))
    assert comparison_of(experiment)["first_difference"]["values"] == ["float32[4]", "float32[3]"]


def test_a_failed_validation_is_no_identity_even_where_all_bits_are_equal(experiment):
    edit_json(
        experiment.files(OTHER).iteration(1) / "readbacks/train/rank00000.json",
        lambda r: r["modules"]["ffn"].update(implementation="torch"),
    )
    record = comparison_of(experiment)
    assert record["verdict"] == "different" and record["first_difference"] is None
    assert record["reasons"][0].startswith(f"validation of {OTHER} failed: i0001/readbacks/train/rank00000.json: ffn ran torch")


def test_files_that_changed_after_validation_are_noticed(experiment):
    runs = [RunRecord(experiment.files(k), validate(cfg, experiment.files(k)), {}, {}) for k, cfg in experiment.configs.items()]
    for key in experiment.configs:  # equal in all runs: the comparison alone would see nothing
        edit_arrays(experiment.paths.run(key) / "weights/weight_v000003/model.safetensors", add_ulp("model.norm.weight", 0))
    record = compare(runs, ExperimentId("tiny", experiment.digest, "R/R"))
    assert record["verdict"] == "different" and "changed after its validation" in record["reasons"][0]


def test_several_updates_an_iteration_are_compared_step_by_step(tmp_path):
    experiment = make_experiment(tmp_path, num_updates=2)
    assert comparison_of(experiment)["verdict"] == "identical"
    edit_json(experiment.files(OTHER).iteration(2) / "train/hashes.json", lambda h: h["updates"][1]["gradients"].popitem())
    found = comparison_of(experiment)["first_difference"]
    assert (found["iteration"], found["step"], found["quantity"], found["values"][1]) == (2, 3, "gradients", None)


def test_stage_writes_record_and_page(experiment, tmp_path):
    validations = validate_all(experiment, tmp_path)
    identity = ExperimentId("tiny", experiment.digest, "R/R")
    record = stage.run(experiment.configs, validations, identity, experiment.paths, tmp_path / "out")
    assert read_json(tmp_path / "out" / "comparison.json") == record
    assert str(tmp_path) not in (tmp_path / "out" / "comparison.json").read_text()
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert record["result_digest"] in page and "<svg" in page and "1 &lt;b&gt;" in page and "<b>" not in page
    performance = record["runs"][0]["performance"]["0"]
    assert performance["perf/step_time"] == performance["perf/train_wait_time"] + performance["perf/train_time"] == 3.51
    assert performance["perf/actor_train_tflops"] * 0.5 == pytest.approx(3 * performance["perf/log_probs_tflops"] * 0.25)
    assert performance["perf/actor_train_tok_per_s"] == 23 / 0.5 and performance["reason"] is None
    assert record["runs"][0]["executed_or_cached"] == {"rollout": "executed", "ref_logprob": "executed", "train": "executed"}

    # other bytes than those that the log is about: DVC has brought back an older result
    edit_json(experiment.files(record["oracle"]).iteration(2) / "rollout" / "summary.json", lambda summary: summary.update(note=1))
    record = stage.run(experiment.configs, validations, identity, experiment.paths, tmp_path / "out")
    assert record["runs"][0]["executed_or_cached"]["rollout"] == "cached"
    assert record["runs"][0]["performance"]["0"]["perf/step_time"] == 3.51
    assert (
        record["runs"][0]["performance"]["1"]["perf/rollout_time"] is None and "rollout" in record["runs"][0]["performance"]["1"]["reason"]
    )


def test_a_cached_stage_has_no_timing_and_the_result_digest_no_time(experiment, tmp_path):
    files = experiment.files(ORACLE)
    before = read_evidence(files).result_digest
    (files.logs(1) / "train.json").unlink()
    identity = ExperimentId("tiny", experiment.digest, "R/R")
    record = stage.run(experiment.configs, validate_all(experiment, tmp_path), identity, experiment.paths, tmp_path / "out")
    performance = record["runs"][0]["performance"]["0"]
    assert performance["perf/step_time"] is None and performance["perf/ref_log_probs_time"] == 0.25 and "train" in performance["reason"]
    assert record["runs"][0]["result_digest"] == before


def test_flops_by_hand():
    shape = ModelShape(num_layers=3, hidden=8, intermediate=16, num_heads=2, num_kv_heads=1, head_dim=4, vocab=32)
    s, h = 5, 8
    layer = 2 * s * h * 8 + 4 * s * h * 4 + s * s * 8 + s * s * 8 + 2 * s * h * h + 6 * s * h * 16
    assert forward_flops([5, 5], shape) == 2 * (3 * layer + 2 * s * h * 32)


@pytest.mark.parametrize("change", [{"verdict": "identical"}, {"verdict": "maybe"}, {"result_digest": "x"}, {"runs": []}, {"extra": 1}])
def test_the_schema_refuses_records_that_contradict_themselves(experiment, change):
    edit_json(experiment.files(OTHER).iteration(1) / "train" / "metrics.json", lambda m: m["0"].update({"train/loss": 9.0}))
    with pytest.raises(jsonschema.ValidationError):
        check_schema("comparison", {**comparison_of(experiment), **change})


def test_token_hash_is_that_of_the_rollout_record(experiment):
    from pipeline.records import Rollout, tokens_sha256

    rollout = Rollout.load(experiment.files(ORACLE).iteration(1) / "rollout")
    assert comparison_of(experiment)["runs"][0]["tokens"]["0"] == {
        "sha256": tokens_sha256(vars(rollout)), "sample_count": 4, "token_count": 23,
    }  # fmt: skip
    assert sha256_tensor(rollout.tokens) == read_evidence(experiment.files(ORACLE)).link(1, "tokens").parts["tokens"]


def _in_metrics(change):
    return lambda files: edit_json(files.iteration(1) / "train/metrics.json", change)


EVERYWHERE = {  # what every run lacks is equal in all of them, and still no evidence
    "gradient norm": (_in_metrics(lambda content: content["0"].pop("train/grad_norm")), "has no train/grad_norm of step 0"),
    "loss": (_in_metrics(lambda content: content["0"].pop("train/loss")), "has no train/loss of step 0"),
    "not a number": (_in_metrics(lambda content: content["0"].update({"train/loss": "low"})), "metrics.json cannot be read"),
    "rollout metrics": (lambda files: edit_json(files.iteration(1) / "rollout/summary.json", lambda c: c.pop("metrics")), "has no metrics"),
    "entropies": (
        lambda files: edit_arrays(files.iteration(1) / "train/logprobs.safetensors", lambda a: a.pop("entropy")),
        "has no entropy",
    ),
    "a gradient": (
        lambda files: edit_json(files.iteration(1) / "train/hashes.json", lambda c: c["updates"][0]["gradients"].pop("model.norm.weight")),
        "are not of the same tensors (the first: model.norm.weight)",
    ),
    "precision": (
        lambda files: edit_arrays(
            files.iteration(1) / "rollout/completions.safetensors", lambda a: a.update(logprobs=a["logprobs"].astype(np.float64))
        ),
        "rollout is float64",
    ),
}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_what_every_run_lacks_is_a_difference(experiment, name):
    damage, said = EVERYWHERE[name]
    for key in experiment.configs:
        damage(experiment.files(key))
    record = comparison_of(experiment)
    errors = [error for run in record["runs"] for error in run["validation"]["errors"]]
    assert record["verdict"] == "different" and said in " ".join(errors), errors

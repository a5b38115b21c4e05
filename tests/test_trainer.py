"""One hash of weights, moments, gradients and norms over layouts and ZeRO stages - on a stand-in model (trainer_ranks.py), with real
DeepSpeed engines on gloo ranks. What it does not prove: that the real model's gradients are right (test_model.py), or anything on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config import Numerics, Optimizer
from pipeline.digest import hash_safetensors
from pipeline.errors import UserError
from pipeline.layout import MeshShape, ModelShape
from stages import weights, zero_hooks
from stages.exact_gradients import ExactGradients
from stages.mesh import Mesh
from stages.optimizer import _cos_pi, learning_rate, parameter_groups
from stages.parallel import Parallel

ORACLE = {"name": "oracle", "layout": [1, 1, 1], "zero": [0]}
FAST = [
    {"name": "tp2", "layout": [2, 1, 1], "zero": [2]},
    {"name": "cp2", "layout": [1, 2, 1], "zero": [1]},
    {"name": "dp3", "layout": [1, 1, 3], "zero": [3], "micro_batch": 1},  # 5 samples: one rank runs an empty micro-batch
]
WIDE_LAYOUTS = ([1, 1, 1], [2, 1, 1], [3, 1, 1], [1, 2, 1], [1, 3, 1], [1, 1, 2], [1, 1, 3], [2, 2, 1], [2, 1, 2], [3, 2, 1], [2, 2, 2])
EQUAL = ("weights", "exp_avg", "exp_avg_sq", "files", "gradients", "norms", "metrics")


def run_jobs(folder: Path, jobs: list[dict], timeout: int) -> dict[str, dict]:
    """Result of each job and stage, by name such as "tp2z2"."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    script = Path(__file__).with_name("trainer_ranks.py")
    command = [sys.executable, str(script), str(folder), *map(json.dumps, jobs)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def assert_equal(result: dict, oracle: dict, name: str) -> None:
    different = [key for key in EQUAL if result[key] != oracle[key]]
    assert not different, f"{name}: {different}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict[str, dict]]:
    folder = tmp_path_factory.mktemp("trainer")
    floats = [{"name": f"float{n}", "layout": [1, 1, n], "zero": [0], "case": "P"} for n in (1, 2)]
    first = {"name": "first", "layout": [2, 1, 1], "zero": [2], "steps": [0, 2]}
    resumed = {"name": "resumed", "layout": [1, 1, 2], "zero": [3], "steps": [2, 3], "from": "firstz2"}
    return folder, run_jobs(folder, [ORACLE, *FAST, *floats, first, resumed], timeout=300)


@pytest.mark.parametrize("name", [f"{job['name']}z{job['zero'][0]}" for job in FAST])
def test_every_layout_and_stage_gives_the_oracles_bytes(trained, name):
    _, results = trained
    assert_equal(results[name], results["oraclez0"], name)
    assert results[name]["negative_zero"]
    assert len(set(map(str, results["oraclez0"]["gradients"]))) == 3  # three different steps
    assert min(map(float.fromhex, results["oraclez0"]["norms"])) > 0.05  # clipping was active


def test_float_sums_are_found(trained):
    """The control: autograd's and the library's float sums differ between one rank and two, and this comparison says so."""
    _, results = trained
    one, two = results["float1z0"], results["float2z0"]
    assert one["gradients"] != two["gradients"] and one["weights"] != two["weights"] and one["norms"] != two["norms"]


def test_exact_and_float_gradients_agree_within_rounding(trained):
    folder, results = trained
    for a, b in zip(results["oraclez0"]["norms"], results["float1z0"]["norms"], strict=True):
        assert float.fromhex(a) == pytest.approx(float.fromhex(b), rel=1e-5)
    exact, floats = (load_file(folder / run / "state" / "exp_avg.safetensors") for run in ("oraclez0", "float1z0"))
    for name in exact:
        torch.testing.assert_close(exact[name], floats[name], rtol=1e-3, atol=1e-6)


def test_resume_in_another_layout_and_stage(trained):
    _, results = trained
    resumed, oracle = results["resumedz3"], results["oraclez0"]
    for key in ("weights", "exp_avg", "exp_avg_sq", "files"):
        assert resumed[key] == oracle[key], key
    for key in ("gradients", "norms", "metrics"):
        assert resumed[key] == oracle[key][2:], key


def test_saved_files_hold_what_their_hashes_say(trained):
    folder, _ = trained
    saved = folder / "tp2z2"
    recorded = json.loads((saved / "weights" / "tensors.json").read_text())["sha256"]
    assert recorded == hash_safetensors(saved / "weights" / "model.safetensors")
    assert [name for name, _ in weights.read_weights(saved / "weights")] == sorted(recorded)
    assert json.loads((saved / "state" / "step.json").read_text()) == {"step": 3}
    assert sum(name.startswith("exp_avg/") for name in json.loads((saved / "state" / "tensors.json").read_text())["sha256"]) == len(
        recorded
    )


def test_a_flipped_bit_is_found(trained, tmp_path):
    folder, _ = trained
    for name in ("model.safetensors", "tensors.json"):
        (tmp_path / name).write_bytes((folder / "oraclez0" / "weights" / name).read_bytes())
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=r"q_proj.weight does not match"):
        list(weights.read_weights(tmp_path))
    (tmp_path / "tensors.json").unlink()
    with pytest.raises(UserError, match=r"tensors\.json: missing"):
        list(weights.read_weights(tmp_path))


@pytest.mark.slow
def test_all_layouts_and_stages(tmp_path):
    jobs = [{"name": "x".join(map(str, layout)), "layout": list(layout), "zero": [0, 1, 2, 3], "micro_batch": 0} for layout in WIDE_LAYOUTS]
    results = run_jobs(tmp_path, jobs, timeout=600)
    assert len(results) == 4 * len(WIDE_LAYOUTS)
    for name, result in results.items():
        assert_equal(result, results["1x1x1z0"], name)


# --- the parts -----------------------------------------------------------------------------------------------------------------
def test_exact_gradients_name_the_tensor_that_overflows():
    grads = ExactGradients({"a.weight": torch.Size([2]), "b.weight": torch.Size([3])}, scale_log2=40)
    grads.buffer("a.weight").add_(torch.tensor([1 << 40, 3 << 39]))
    assert not grads.touched("b.weight")
    grads.all_reduce(None)
    assert grads.touched("b.weight")
    assert grads.finish("a.weight", 2.0).tolist() == [0.5, 0.75] and not grads.touched("a.weight")
    grads.buffer("b.weight")[1] = 1 << 62
    with pytest.raises(OverflowError, match=r"b\.weight"):
        grads.all_reduce(None)
    with pytest.raises(OverflowError, match=r"gradient of b.weight: .*grad_scale_log2=40"):
        grads.finish("b.weight", 2.0)
    with pytest.raises(KeyError):
        grads.buffer("c.weight")


def test_a_placeholder_costs_one_element():
    weight = torch.zeros(1000, 1000)
    assert ExactGradients({}, 40).placeholder(weight) is None
    zero = ExactGradients({}, 40, autograd_placeholder=True).placeholder(weight)
    assert zero.shape == weight.shape and zero.untyped_storage().nbytes() == 4


def test_only_the_pinned_deepspeed_is_accepted(monkeypatch):
    monkeypatch.setattr(zero_hooks, "DEEPSPEED_VERSION", "0.19.7")
    with pytest.raises(RuntimeError, match=r"deepspeed==0.19.7 is needed .* but 0.19.8 is installed"):
        zero_hooks.check()


def test_parameter_groups():
    names = ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight")
    named = {name: torch.zeros(1) for name in names}
    matrices, norms = parameter_groups(named.items(), 0.1)
    assert [id(p) for p in matrices["params"]] == [id(named["lm_head.weight"])] and matrices["weight_decay"] == 0.1
    assert len(norms["params"]) == 3 and norms["weight_decay"] == 0.0 and (matrices["name"], norms["name"]) == ("pg_0", "pg_1")


def test_learning_rate():
    rates = {
        s: [learning_rate(Optimizer(lr=1.0, schedule=s, warmup_steps=2), i, 6) for i in range(7)] for s in ("constant", "linear", "cosine")
    }
    assert rates["constant"] == [0.5] + [1.0] * 6
    assert rates["linear"] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates["cosine"] == pytest.approx([0.5, 1.0, 1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0.0], abs=1e-15)
    xs = np.linspace(0, 1, 101)
    np.testing.assert_allclose([_cos_pi(float(x)) for x in xs], np.cos(np.pi * xs), atol=1e-15)
    with pytest.raises(ValueError, match=r"optimizer\.schedule='step'"):
        learning_rate(Optimizer(schedule="step"), 5, 9)


def test_streamed_file_reads_as_safetensors(tmp_path):
    tensors = {"b": torch.randn(3, 5), "a": torch.randn(7), "c": torch.empty(0, 2)}
    path = tmp_path / "x.safetensors"
    shapes = {name: t.shape for name, t in tensors.items()}
    with weights.safetensors_writer(path, shapes) as write:
        for name, tensor in tensors.items():
            write(name, tensor)
        assert not path.exists()
    loaded = load_file(path)
    assert all(torch.equal(loaded[name], t) for name, t in tensors.items())
    save_file(tensors, tmp_path / "theirs.safetensors", weights.METADATA)
    assert hash_safetensors(path) == hash_safetensors(tmp_path / "theirs.safetensors")
    for wrong in (("a", tensors["a"]), ("b", tensors["a"]), ("b", tensors["b"].double())):
        with pytest.raises(ValueError, match="out of order"), weights.safetensors_writer(tmp_path / "bad", shapes) as write:
            write(*wrong)
    with pytest.raises(ValueError, match="never written"), weights.safetensors_writer(tmp_path / "bad", shapes) as write:
        write("b", tensors["b"])
    assert not list(tmp_path.glob("*bad*"))


def test_weights_of_another_model_are_refused():
    model = torch.nn.Module()
    model.lm = torch.nn.Linear(2, 3, bias=False)
    shape = ModelShape(num_layers=0, hidden=2, intermediate=2, num_heads=1, num_kv_heads=1, head_dim=2, vocab=3)
    model.par = Parallel(Mesh(MeshShape(), 0), shape, Numerics())
    good = ("lm.weight", torch.randn(3, 2))
    weights.load_slices(model, [good, ("lm_head.weight", torch.zeros(3, 2))])
    assert torch.equal(model.lm.weight, good[1])
    for tensors, message in (
        ([], "lack the tensor lm.weight"),
        ([good, ("other", good[1])], "unknown tensor other"),
        ([("lm.weight", torch.zeros(2, 2))], r"lm.weight has shape \(2, 2\)"),
    ):
        with pytest.raises(UserError, match=message):
            weights.load_slices(model, tensors)

"""Bisecting: two traces of any layouts agree operation by operation, and where a kernel or a bug differs, it is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from working_copy import make_working_copy, patch, pipeline, run_module

from pipeline.bisect import STAGES
from pipeline.evidence.chain import QUANTITIES, STEP_QUANTITIES
from pipeline.evidence.traces import element, first_unequal, read_trace


# --- comparing traces ----------------------------------------------------------------------------------------------------------
def write(folder: Path, *ranks: dict[str, tuple[list[int], list[list[float]], int]]) -> dict:
    """A trace; each rank's operations as name: (rows, fp32 values [M,N], first leaf), in leaves of two elements."""
    folder.mkdir()
    for rank, operations in enumerate(ranks):
        tensors, entries = {}, []
        for i, (name, (rows, values, first)) in enumerate(operations.items()):
            bits = np.array(values, dtype=np.float32).view(np.int32)
            entries.append({"name": name, "dtype": "float32", "leaf": 2, "first": first})
            leaves = bits.astype(np.int64).reshape(len(rows), -1, 2)
            tensors |= {f"{i}.rows": np.array(rows), f"{i}.hashes": leaves @ np.array([3, 5]), f"{i}.values": bits}
        save_file(tensors, folder / f"rank{rank:05d}.safetensors", {"operations": json.dumps(entries)})
    return read_trace(folder)


X, Y = "rollout|forward|layer.0|x", "rollout|forward|layer.0|y"
WHOLE = {X: ([7, 8], [[1, 2, 3, 4], [5, 6, 7, 8]], 0), Y: ([7, 8], [[0, 1], [2, 3]], 0)}
LEFT = {X: ([7, 8], [[1, 2], [5, 6]], 0), Y: ([7], [[0, 1]], 0)}
RIGHT = {X: ([8, 7], [[7, 8], [3, 4]], 1), Y: ([8], [[2, 3]], 0)}


def test_traces_of_other_slices_and_rows_are_the_same(tmp_path):
    assert first_unequal(write(tmp_path / "a", WHOLE), write(tmp_path / "b", LEFT, RIGHT)) is None


def test_the_first_operation_row_and_element_are_named(tmp_path):
    wrong = {X: ([8, 7], [[7, np.nextafter(np.float32(8), np.float32(9))], [3, 4]], 1), Y: ([8], [[9, 9]], 0)}
    both = write(tmp_path / "a", WHOLE), write(tmp_path / "b", LEFT, wrong)
    place = first_unequal(*both)
    assert (place.name, place.row, place.leaf, place.ranks, place.unequal, place.total) == (X, 8, 1, (0, 1), 1, 4)
    assert element(place, both) == {"element": 3, "values": ["0x41000000 (8.0)", "0x41000001 (8.000000953674316)"]}


def test_ranks_that_disagree_within_a_run_are_found_on_either_side(tmp_path):
    odd = {Y: ([7], [[0, 2]], 0)}
    a, b = write(tmp_path / "a", {Y: WHOLE[Y]}, odd), write(tmp_path / "b", {Y: WHOLE[Y]})
    assert (first_unequal(a, b).sides, first_unequal(a, b).ranks) == ((0, 0), (0, 1))
    assert (first_unequal(b, a).sides, first_unequal(b, a).ranks) == ((0, 1), (0, 1))


def test_a_row_that_one_run_lacks_is_a_difference(tmp_path):
    a, b = write(tmp_path / "a", {Y: WHOLE[Y]}), write(tmp_path / "b", {Y: ([7], [[0, 1]], 0)})
    place = first_unequal(a, b)
    assert (place.row, place.ranks) == (8, (0, None))
    assert element(place, (a, b)) == {"element": None, "values": ["present", "missing"]}


def test_in_a_rollout_an_earlier_step_comes_before_an_earlier_operation(tmp_path):
    late, early = {X: ([7, 8], [[1, 2, 3, 4], [0, 0, 0, 0]], 0), Y: ([7, 8], [[9, 9], [2, 3]], 0)}, WHOLE
    a, b = write(tmp_path / "a", early), write(tmp_path / "b", late)
    assert first_unequal(a, b).name == X
    assert first_unequal(a, b, lambda rows: rows - 7).name == Y


def test_every_quantity_but_the_prompts_is_of_one_stage():
    quantities = {*(name for name in QUANTITIES if name), *STEP_QUANTITIES}
    assert sorted(name for names in STAGES.values() for name in names) == sorted(quantities - {"prompts"})


# --- runs ----------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    folder = make_working_copy(tmp_path_factory.mktemp("bisect") / "lockstep")
    code, out = pipeline(folder, "-m", "layout=tp1cp1dp1,tp2cp2-rtp1cp2dp2-m1-b3", "kernels=RR,PR", "iterations=1", "name=b")
    assert code == 3, out
    return folder


def keys(folder: Path) -> dict[str, str]:
    """Registered runs of the test: layout and case -> key."""
    return {path.name[:-9].removeprefix("b-"): path.name for path in (folder / "runs").glob("b-*")}


def bisect(folder: Path, a: str, b: str) -> tuple[int, dict, str]:
    code, out = run_module(folder, "pipeline.bisect", a, b)
    report = folder / out.splitlines()[-1].removeprefix("report: ")
    return code, json.loads(report.read_text()), out


@pytest.mark.parametrize("stage", ["rollout", "ref_logprob", "train"])
def test_every_operation_of_every_layout_gives_the_oracles_bits(clone, tmp_path, stage):
    own = keys(clone)
    for name in ("tp1cp1dp1", "tp2cp2-rtp1cp2dp2-m1-b3"):
        command = ["--iteration", "1", "--stage", stage, "--folder", str(tmp_path / name)]
        code, out = run_module(clone, "stages.trace", own[name], *command)
        assert code == 0, out
    a, b = (read_trace(tmp_path / name) for name in ("tp1cp1dp1", "tp2cp2-rtp1cp2dp2-m1-b3"))
    assert first_unequal(a, b) is None
    assert list(a) == list(b) and len(b[next(iter(b))]) == 4  # ranks
    compared = {name.split("|")[1] for name in a}
    assert compared == ({"forward", "backward", "optimizer"} if stage == "train" else {"forward"})
    some = next(name for name in a if name.endswith("down_proj"))
    a[some][0].hashes[-1, -1] += 1
    assert first_unequal(a, b).name == some


def test_the_kernel_that_differs_is_named_across_layouts(clone):
    own = keys(clone)
    code, record, out = bisect(clone, own["tp1cp1dp1"], own["tp2cp2-rtp1cp2dp2-m1-b3-P_R"])
    op = record["operation"]
    assert code == 3 and record["reproduced"] == [True, True], out
    assert (record["stage"], op["phase"], op["pass"], op["layer"], op["operation"]) == ("ref_logprob", "reference", "forward", 0, "q_proj")
    assert op["values"][0] != op["values"][1] and "0x" in op["values"][0]
    code, out = run_module(clone, "pipeline.bisect", own["tp1cp1dp1"], own["tp2cp2-rtp1cp2dp2-m1-b3"])
    assert code == 0 and out.startswith("identical: "), out


@pytest.mark.slow
def test_the_other_kernel_cases_are_named(clone):
    assert pipeline(clone, "-m", "layout=tp1cp1dp1", "kernels=RP,PP,logp_PR", "iterations=1", "name=b")[0] in (0, 3)
    own = keys(clone)
    found = {}
    for case in ("R_P", "P_P", "logp_PR"):
        code, record, out = bisect(clone, own["tp1cp1dp1"], next(key for name, key in own.items() if name.endswith(case)))
        assert code == 3, out
        op = record["operation"]
        found[case] = record["stage"], op["module"].rpartition(".")[2], op["operation"]
    linear = "self_attn", "q_proj"
    assert found == {"R_P": ("rollout", *linear), "P_P": ("rollout", *linear), "logp_PR": ("ref_logprob", "lm_head", "logprob")}


def test_a_bug_of_one_ulp_on_one_rank_is_found_in_the_backward_pass(clone):
    correct = "        return None, None, None, None, linear.input_grad(dy, ctx.par.stored(w), ctx.leaf_out), ctx.par.placeholder(w)"
    bug = f"""        dx = linear.input_grad(dy, ctx.par.stored(w), ctx.leaf_out)
        if ctx.par.mesh.t == 1 and w.tensor_name == "model.layers.1.mlp.down_proj.weight" and len(dx):
            dx.view(torch.int32).add_(1)
{correct.replace("linear.input_grad(dy, ctx.par.stored(w), ctx.leaf_out)", "dx")}"""
    patch(clone, "stages/lockstep_ops.py", correct, bug)
    try:
        code, out = pipeline(clone, "-m", "layout=tp1cp1dp1,tp2", "iterations=1", "name=bug")
        assert code == 3 and "gradients" in out, out
        own = {path.name.split("-")[1]: path.name for path in (clone / "runs").glob("bug-*")}
        code, record, out = bisect(clone, own["tp1cp1dp1"], own["tp2"])
    finally:
        patch(clone, "stages/lockstep_ops.py", bug, correct)
    op = record["operation"]
    assert (code, record["reproduced"]) == (3, [True, True]), out
    place = op["phase"], op["pass"], op["module"], op["operation"], op["ranks"]
    assert place == ("update 1", "backward", "model.layers.1.mlp", "down_proj", [0, 1])
    first, second = (int(value.split()[0], 16) for value in op["values"])
    assert second == first + 1
    # without the bug, the run can't be made again, and bisecting says so
    code, record, out = bisect(clone, own["tp1cp1dp1"], own["tp2"])
    assert (code, record["reproduced"], record["operation"]) == (3, [True, False], None)
    assert "OTHER bytes" in out and "the difference is in the files only" in out


def test_bad_arguments_are_one_line_each(clone, tmp_path):
    own = keys(clone)
    assert run_module(clone, "pipeline.bisect", own["tp1cp1dp1"], "none")[0] == 2
    assert run_module(clone, "pipeline.bisect", own["tp1cp1dp1"], f"{tmp_path}/none")[0] == 2
    (tmp_path / "runs").mkdir()
    moved = clone / "runs" / own["tp1cp1dp1"] / "i0001/ref_logprob"
    moved.rename(tmp_path / "ref_logprob")
    code, out = run_module(clone, "pipeline.bisect", own["tp1cp1dp1"], own["tp2cp2-rtp1cp2dp2-m1-b3"])
    (tmp_path / "ref_logprob").rename(moved)
    assert code == 4 and "ref.safetensors is missing" in out and len(out.splitlines()) == 1, out

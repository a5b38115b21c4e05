"""Named faults of what the ranks report: tokens, sidecars, readbacks - and files that are damaged as files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.mutations.elements import new_file, stored_tensors
from tests.mutations.files import missing
from tests.mutations.mutation import Mutation, folder, named, place, refit_rollout, replace_folder
from tests.mutations.runs import Runs
from tests.mutations.verdicts import Expected
from tests.synthetic_runs import edit_arrays, edit_json


# --- tokens -----------------------------------------------------------------------------------------------------------------------
def extra_token(runs: Runs) -> Expected:
    """Sample 1 of iteration 2 gets one more token at its end; lengths, logprobs and counts agree in every file of the iteration."""
    iteration, at = folder(runs, "i0002"), {}

    def lengthen(arrays: dict[str, np.ndarray]) -> None:
        responses = np.cumsum(arrays["lengths"] - arrays["prompt_lengths"])
        at["token"], at["response"] = int(np.cumsum(arrays["lengths"])[1]), int(responses[1])
        arrays["tokens"] = np.insert(arrays["tokens"], at["token"], arrays["tokens"][0])
        arrays["logprobs"] = np.insert(arrays["logprobs"], at["response"], np.float32(-1))
        arrays["lengths"][1] += 1
        refit_rollout(iteration / "rollout/completions.safetensors", arrays)

    def lengthen_all(arrays: dict[str, np.ndarray]) -> None:
        arrays |= {name: np.insert(array, at["response"], np.float32(-1)) for name, array in arrays.items()}

    edit_arrays(iteration / "rollout/completions.safetensors", lengthen)
    edit_arrays(iteration / "ref_logprob/ref.safetensors", lengthen_all)
    edit_arrays(iteration / "train/logprobs.safetensors", lengthen_all)
    tp = runs.configs[runs.other].layout.tp
    return Expected(place(2, "tokens", tensor="tokens", index=None), f"response tokens are not in exactly {tp} sidecars")


def extra_logprob(file: str, name: str, quantity: str) -> Mutation:
    """One value more than tokens."""

    def change(runs: Runs) -> Expected:
        edit_arrays(folder(runs, f"i0001/{file}"), lambda arrays: arrays.update({name: np.append(arrays[name], np.float32(-1))}))
        kind = quantity.removesuffix("_logprob")
        return Expected(place(1, quantity, tensor="logprobs", index=None), f"i0001: number of {kind} logprobs is ")

    return named(f"an extra {quantity.replace('_', ' ')}", change)


# --- sidecars and readbacks -------------------------------------------------------------------------------------------------------
def sidecars(runs: Runs) -> list[Path]:
    return sorted(folder(runs, "i0002/sidecars").glob("*.safetensors"))


def renamed_sidecar(runs: Runs) -> Expected:
    path = sidecars(runs)[-1]
    path.rename(path.with_name(path.name.replace("call0", "call1")))
    return Expected(reason=f"i0002/sidecars/{path.name}: sidecar is missing")


def dropped_sidecar(runs: Runs) -> Expected:
    path = sidecars(runs)[0]
    path.unlink()
    return Expected(reason=f"i0002/sidecars/{path.name}: sidecar is missing")


def added_sidecar(runs: Runs) -> Expected:
    path = sidecars(runs)[0]
    added = path.with_name("rank00099.call00000000.safetensors")
    shutil.copy(path, added)
    return Expected(reason=f"i0002/sidecars/{added.name}: sidecar of a rank or call that the layout doesn't have")


def stale_sidecars(runs: Runs) -> Expected:
    shutil.rmtree(folder(runs, "i0002/sidecars"))
    shutil.copytree(folder(runs, "i0001/sidecars"), folder(runs, "i0002/sidecars"))
    return Expected(reason="i0002/sidecars/rank00000.call00000000.safetensors: ")


def readback(name: str, stage: str, change: Callable[[dict[str, Any]], None], reason: str) -> Mutation:
    """In the file of the stage's last rank, iteration 2."""

    def apply(runs: Runs) -> Expected:
        path = sorted(folder(runs, f"i0002/readbacks/{stage}").glob("*.json"))[-1]
        edit_json(path, change)
        return Expected(reason=f"i0002/readbacks/{stage}/{path.name}: {reason}")

    return named(f"readback of {stage}: {name}", apply)


def of_module(module: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["modules"][module].update(fields)


def call_off_by_one(content: dict[str, Any]) -> None:
    content["modules"]["attention"]["call_count"] -= 1


def missing_rank(runs: Runs) -> Expected:
    path = sorted(folder(runs, "i0002/readbacks/train").glob("*.json"))[-1]
    path.unlink()
    return Expected(reason=f"i0002/readbacks/train/{path.name}: readback is missing")


def added_rank(runs: Runs) -> Expected:
    ranks = folder(runs, "i0001/readbacks/rollout")
    shutil.copy(ranks / "rank00000.json", ranks / "rank00099.json")
    return Expected(reason="i0001/readbacks/rollout/rank00099.json: readback of a rank that the layout doesn't have")


def one_rank_for_another(runs: Runs) -> Expected:
    ranks = folder(runs, "i0001/readbacks/train")
    shutil.copy(ranks / "rank00000.json", ranks / "rank00001.json")
    return Expected(reason="i0001/readbacks/train/rank00001.json: rank is 0, expected 1")


def run_of_the_oracle(runs: Runs) -> Expected:
    """A cache that hands out the oracle's run for the other's: all results are right, and nothing of it was run in this layout."""
    replace_folder(runs.paths.run(runs.oracle), folder(runs))
    last = sorted(path.name for path in runs.pristine.run(runs.other).glob("i0001/readbacks/train/*.json"))[-1]
    return Expected(reason=f"i0001/readbacks/train/{last}: readback is missing")


# --- files as files ---------------------------------------------------------------------------------------------------------------
WEIGHTS = "weights/weight_v000002/model.safetensors"


def cut_file(runs: Runs) -> Expected:
    """What a full disk leaves."""
    path = folder(runs, WEIGHTS)
    new_file(path, path.read_bytes()[:-4])
    return Expected(place(1, "weights"), f"{WEIGHTS} cannot be read: ")


def appended_bytes(runs: Runs) -> Expected:
    path = folder(runs, WEIGHTS)
    new_file(path, path.read_bytes() + bytes(4))
    return Expected(place(1, "weights"), f"{WEIGHTS} cannot be read: ")


def other_header(name: str, tensor: str, old: str, new: str, expected: Expected) -> Mutation:
    """Another word of one length in the entry of `tensor` in the header: its bytes stay."""

    def change(runs: Runs) -> Expected:
        path = folder(runs, "i0002/train/logprobs.safetensors")
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        entry = json.dumps({tensor: header[tensor]}, separators=(",", ":"))[1:-1].encode()
        assert data.count(entry) == 1 and len(old) == len(new) and old.encode() in entry
        new_file(path, data.replace(entry, entry.replace(old.encode(), new.encode())))
        return expected

    return named(name, change)


def edited_text(runs: Runs) -> Expected:
    path = folder(runs, "i0001/rollout/completions.jsonl")
    new_file(path, path.read_bytes().replace(b"=", b":", 1))
    return Expected(reason="i0001: sha256 of completions.jsonl is ")


def text_without_objects(runs: Runs) -> Expected:
    new_file(folder(runs, "i0001/rollout/completions.jsonl"), b"[]\n")
    return Expected(reason="i0001: sha256 of completions.jsonl is ")


def other_shape(runs: Runs) -> Expected:
    """A row less in a matrix of both runs' weights."""
    path = folder(runs, WEIGHTS)
    tensor = next(t for t in stored_tensors(path) if len(t.shape) == 2)
    edit_arrays(path, lambda arrays: arrays.update({tensor.name: arrays[tensor.name][:-1].copy()}))
    rows, columns = tensor.shape
    values = [f"float32[{rows}, {columns}]", f"float32[{rows - 1}, {columns}]"]
    return Expected(place(1, "weights", tensor=tensor.name, values=values))


MUTATIONS = [
    named("an extra token", extra_token),
    extra_logprob("rollout/completions.safetensors", "logprobs", "rollout_logprob"),
    extra_logprob("ref_logprob/ref.safetensors", "logprobs", "reference_logprob"),
    extra_logprob("train/logprobs.safetensors", "old", "old_logprob"),
    extra_logprob("train/logprobs.safetensors", "current", "current_logprob"),
    named("sidecar dropped", dropped_sidecar),
    named("sidecar renamed", renamed_sidecar),
    named("sidecar added", added_sidecar),
    named("sidecars of iteration 1 in place of 2", stale_sidecars),
    readback(
        "torch's attention", "train", of_module("attention", implementation="torch"), "attention ran torch, case R/R asks for lockstep"
    ),
    readback("another backend", "rollout", of_module("logp", backend_id="lockstep.linear_logp.tree.v2"), "logp.backend_id is lockstep.lin"),
    readback("one call less", "ref_logprob", call_off_by_one, "attention.call_count is "),
    readback("a module missing", "train", lambda content: content["modules"].pop("ffn"), "module ffn is missing"),
    readback("no version of torch", "rollout", lambda content: content.update(versions={"pytorch": "2.0"}), "versions has no torch"),
    named("readback of a rank missing", missing_rank),
    named("readback of a rank too many", added_rank),
    named("readback of one rank for another", one_rank_for_another),
    named("the oracle's run in place of another layout's", run_of_the_oracle),
    named("weights cut short", cut_file),
    named("weights with bytes appended", appended_bytes),
    named("weights of another shape", other_shape),
    other_header("tensor renamed", "entropy", "entropy", "entrop1", Expected(place(2, "entropy", index=None), "has no entropy")),
    other_header("float32 called int32", "entropy", "F32", "I32", Expected(place(2, "entropy", tensor="entropy", index=None))),
    named("completion's text edited", edited_text),
    named("completions of another kind", text_without_objects),
    named(
        "readbacks missing",
        missing("i0001/readbacks/rollout", Expected(reason="i0001/readbacks/rollout/rank00000.json: readback is missing")),
    ),
]

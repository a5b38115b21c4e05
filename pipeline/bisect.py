"""python -m pipeline.bisect RUN_A RUN_B: for two runs that differ, the first operation, pass, layer, rank and element where they part.

RUN is a key of params.yaml, or FOLDER/KEY for a run of another clone (another version of the code). The first differing stage of the first
differing iteration is run again on both sides, each from its own files, with a hash per operation; a second time, the values of the one
operation are kept. No output of the runs is written to. The answer is printed and kept as reports/EXPERIMENT/bisect-RUN_A-RUN_B.json.

Exit status: 0 the runs are identical, 2 bad argument, 3 they differ, 4 a file of a run is missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import registry
from pipeline.config import Config
from pipeline.digest import sha256_folder, write_json
from pipeline.errors import MissingPrerequisite, UserError
from pipeline.paths import ROOT, Paths, step

STAGES = {  # whose outputs hold which quantities; prompts are of no iteration's stage
    "rollout": ("tokens", "rollout_logprob", "rewards", "rollout_metrics"),
    "ref_logprob": ("reference_logprob",),
    "train": (
        "old_logprob", "current_logprob", "entropy", "advantages", "metrics", "gradients", "gradient_norm",
        "exp_avg", "exp_avg_sq", "weights",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    key: str
    paths: Paths
    cfg: Config
    experiment: str

    @classmethod
    def of(cls, argument: str) -> Side:
        folder, _, key = argument.rpartition("/")
        root = Path(folder).resolve() if folder else ROOT
        if not (root / "dvc.yaml").is_file():
            raise UserError(f"{argument}: {folder} is no clone of this project; give KEY, or FOLDER/KEY")
        known = registry.load(root)
        return cls(key, known.paths, known.run(key), known.experiment_of(key))

    def trace(self, stage: str, iteration: int, folder: Path, values: str | None = None) -> None:
        """Runs the stage again, traced; its outputs go below `folder`."""
        command = [sys.executable, "-m", "stages.trace", self.key, "--iteration", str(iteration), "--stage", stage, "--folder", str(folder)]
        done = subprocess.run([*command, *(["--values", values] if values else [])], cwd=self.paths.root, stdout=sys.stderr)
        if done.returncode:
            raise UserError(f"{self.key}: its {stage} of iteration {iteration} can't be run again; the reason is above")

    def stored(self, stage: str, iteration: int) -> dict[str, Path]:
        """The stage's outputs whose bytes no layout changes, by the name of their folder in a trace."""
        s = step(self.paths, self.key, iteration, self.cfg.checkpoint.name)
        match stage:
            case "rollout":
                return {"rollout": s.rollout}
            case "ref_logprob":
                return {"ref_logprob": s.ref_logprob}
            case _:
                return {"folder": s.train, "weights": s.weights_out, "state": s.state_out}

    def reproduces(self, stage: str, iteration: int, folder: Path) -> bool:
        """Did the traced stage give the bytes that the run has on disk?"""
        pairs = self.stored(stage, iteration).items()
        return all(sha256_folder(folder / "outputs" / name) == sha256_folder(path) for name, path in pairs)


def bisect(a: Side, b: Side) -> dict[str, Any]:
    """The record: what differs in the files, and the first operation that does. `first_difference` is None for identical runs."""
    from pipeline.evidence.chain import RunFiles, read_evidence
    from pipeline.evidence.first_difference import find_first_difference

    if a.cfg.numerics != b.cfg.numerics:
        raise UserError(f"numerics of {b.key}: not those of {a.key}, so no operation is comparable; give two runs of the same numerics")
    evidence = [read_evidence(RunFiles.of(side.cfg, side.key, side.paths)) for side in (a, b)]
    for own in evidence:
        if own.problems:
            raise MissingPrerequisite(f"{own.files.key}: {own.problems[0]}; run `dvc repro` first")
    record = {"schema_version": "lockstep.bisect.v1", "runs": [a.key, b.key], "kernels": [s.cfg.kernels.case_id for s in (a, b)]}
    difference = find_first_difference(evidence, 0)
    record |= {"first_difference": difference, "stage": None, "reproduced": None, "operation": None}
    if difference is None:
        return record
    if difference["iteration"] == 0 or difference["quantity"] == "prompts":
        return record  # other weights to start from, or other prompts: no operation is to blame
    stage = next(s for s, quantities in STAGES.items() if difference["quantity"] in quantities)
    with tempfile.TemporaryDirectory(prefix="lockstep-bisect-") as temporary:
        reproduced, operation = _trace_both((a, b), stage, difference["iteration"], Path(temporary))
    return {**record, "stage": stage, "reproduced": reproduced, "operation": operation}


def _trace_both(sides: tuple[Side, Side], stage: str, iteration: int, folder: Path) -> tuple[list[bool], dict[str, Any] | None]:
    from pipeline.evidence import traces

    def run(name: str, values: str | None = None) -> list[Path]:
        folders = [folder / f"{name}-{letter}" for letter in "ab"]
        for side, own in zip(sides, folders):
            side.trace(stage, iteration, own, values)
        return folders

    hashes = run("hashes")
    reproduced = [side.reproduces(stage, iteration, own) for side, own in zip(sides, hashes)]
    step_of = _decoding_step(sides[0], iteration) if stage == "rollout" else None
    a, b = (traces.read_trace(own) for own in hashes)
    place = traces.first_unequal(a, b, step_of)
    if place is None:
        return reproduced, None
    a, b = (traces.read_trace(own) for own in run("values", place.name))
    return reproduced, _operation(place, traces.element(place, (a, b)))


def _decoding_step(side: Side, iteration: int):
    """A prompt's rows are computed at once, each later row after the one before it."""
    import numpy as np
    from safetensors.numpy import load_file

    from pipeline.evidence.traces import POSITION_BITS

    rollout = step(side.paths, side.key, iteration, side.cfg.checkpoint.name).rollout
    prompts = load_file(rollout / "completions.safetensors")["prompt_lengths"]
    mask = (1 << POSITION_BITS) - 1
    return lambda rows: np.maximum(0, (rows & mask) - prompts[rows >> POSITION_BITS] + 1)


def _operation(place: Any, element: dict[str, Any]) -> dict[str, Any]:
    from pipeline.evidence.traces import POSITION_BITS

    phase, direction, module, name = place.name.split("|")
    layer = next((int(part) for part in module.split(".") if part.isdigit()), None)
    parameter = direction == "optimizer" or name == "gradient"
    sample, position = (None, None) if parameter else (place.row >> POSITION_BITS, place.row & ((1 << POSITION_BITS) - 1))
    return {
        "phase": phase,
        "pass": direction,
        "module": module,
        "operation": name,
        "layer": layer,
        "sides": list(place.sides),
        "ranks": list(place.ranks),
        "sample": sample,
        "position": position,
        "row": place.row if parameter else None,
        "leaf": place.leaf,
        **element,
        "unequal": place.unequal,
        "compared": place.total,
    }


def lines(record: dict[str, Any]) -> list[str]:
    """What the command prints."""
    a, b = record["runs"]
    difference, op = record["first_difference"], record["operation"]
    if difference is None:
        return [f"identical: {a} and {b}"]
    out = [f"first difference in the files: {difference['text']}"]
    if record["stage"] is None:
        return [*out, "no operation is to blame: the runs start from other weights or prompts"]
    for key, same in zip(record["runs"], record["reproduced"]):
        what = "gives the bytes of its files" if same else "gives OTHER bytes than its files: they, the code or the machine have changed"
        out.append(f"{record['stage']} of iteration {difference['iteration']}, run again: {key} {what}")
    return [*out, f"first operation that differs: {_text(op, record['runs'])}" if op else _no_operation(record)]


def _text(op: dict[str, Any], runs: list[str]) -> str:
    where = f"row {op['row']}" if op["sample"] is None else f"sample {op['sample']}, position {op['position']}"
    layer = "" if op["layer"] is None else f"layer {op['layer']}, "
    sides = [
        f"{value} in {runs[side]} on rank {rank}" if rank is not None else f"no such row in {runs[side]}"
        for value, side, rank in zip(op["values"], op["sides"], op["ranks"])
    ]
    kind = "" if op["pass"] == "optimizer" or op["operation"] == "gradient" else f" ({op['pass']})"
    index = "" if op["element"] is None else f", element {op['element']}"
    return (
        f"{op['phase']}, {layer}{op['module']} {op['operation']}{kind}, {where}{index}: {sides[0]}, {sides[1]}; "
        f"{op['unequal']} of {op['compared']} of its leaves differ"
    )


def _no_operation(record: dict[str, Any]) -> str:
    if not all(record["reproduced"]):
        return "no operation differs now: the difference is in the files only, or can't be made again here"
    return "no operation differs: it arises outside the model and the optimizer, in what is made of their results"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.bisect", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run_a", metavar="RUN_A")
    parser.add_argument("run_b", metavar="RUN_B")
    args = parser.parse_args(argv)
    try:
        a, b = Side.of(args.run_a), Side.of(args.run_b)
        record = bisect(a, b)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    path = Paths(ROOT).report(a.experiment) / f"bisect-{a.key}-{b.key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    print(*lines(record), f"report: {path.relative_to(ROOT)}", sep="\n")
    return 0 if record["first_difference"] is None else 3


if __name__ == "__main__":
    sys.exit(main())

"""What each process left of what it ran, added up again, and the calls that the layout and the response lengths imply."""

from __future__ import annotations

from functools import partial
from typing import Any

from .checks import Checks
from .layouts import decode_steps, mesh, micro_batches, rollout_size, world_size
from .metrics import BATCH, iterations
from .readbacks import MODULES, REFERENCE, ROLLOUT, TRAINING
from .run_files import RunFiles

STAGES = {"train": (TRAINING, "training"), "ref_logprob": (REFERENCE, "reference"), "rollout": (ROLLOUT, "rollout")}


def check_readbacks(own: RunFiles, checks: Checks) -> None:
    section, layout = own.run["validation"]["runtime_readbacks"], own.run["execution"]["layout"]
    for stage, (name, _) in STAGES.items():
        total = Total()
        for number in range(1, len(iterations(own.run)) + 1):
            _add_iteration(own, number, stage, layout, total, checks)
        claimed = section["frameworks"][name]
        named = ("case_id", "expected_implementation")  # which no process reports
        given = {module: {field: mine[field] for field in named} for module, mine in claimed["modules"].items()}
        checks.equal(f"{own.key}: readbacks of {name}", claimed, total.section(given))


def _add_iteration(own: RunFiles, number: int, stage: str, layout: dict[str, Any], total: Total, checks: Checks) -> None:
    tp, cp, dp = mesh(layout, stage)
    expected = _forwards(own, number, stage, layout)
    for rank in range(tp * cp * dp):
        path = (f"i{number:04d}", "readbacks", stage, f"rank{rank:05d}.json")
        readback, place = own.json(*path), f"{own.key}: {'/'.join(path)}"
        if own.attempt(partial(total.add, readback, place, checks)):
            given = {name: readback.get(name) for name in ("mesh", "rank", "side", "world_size")}
            coordinates = [rank % tp, rank // tp % cp, rank // (tp * cp)]
            wanted = {"mesh": coordinates, "rank": rank, "side": STAGES[stage][1], "world_size": tp * cp * dp}
            checks.equal(f"{place}: rank", given, wanted)
            if expected:
                counts = {"forwards": expected[rank], "backwards": expected[rank] // 2 if stage == "train" else 0}
                checks.equal(f"{place}: counts", readback["counts"], counts)


def _of_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is no {kind.__name__}")
    return value


class Total:
    """Over all processes and iterations of one stage."""

    def __init__(self) -> None:
        self.count = 0
        self.builds: set[str] = set()
        self.versions: dict[str, set[str]] = {}
        self.ranks: dict[str, set[int]] = {module: set() for module in MODULES}
        self.calls = dict.fromkeys(MODULES, 0)
        self.backends: dict[str, set[str]] = {module: set() for module in MODULES}
        self.kinds: dict[str, set[str]] = {module: set() for module in MODULES}

    def add(self, readback: dict[str, Any], place: str, checks: Checks) -> bool:
        """ValueError when it is no readback."""
        try:
            for module in MODULES:
                own = readback["modules"][module]
                self.calls[module] += _of_type(own["call_count"], int)
                self.backends[module].add(_of_type(own["backend_id"], str))
                self.kinds[module].add(_of_type(own["implementation"], str))
                self.ranks[module].add(_of_type(readback["rank"], int))
            checks.equal(f"{place}: calls of logp", readback["modules"]["logp"]["call_count"], readback["counts"]["forwards"])
            self.builds.add(_of_type(readback["kernel_build"], str))
            for package, version in readback["versions"].items():
                self.versions.setdefault(package, set()).add(_of_type(version, str))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{place}: is no readback ({type(error).__name__}: {error})") from None
        self.count += 1
        return True

    def section(self, given: dict[str, dict[str, str]]) -> dict[str, Any]:
        """As the validation writes it; given: what is not of the processes."""
        modules = {
            module: {
                "backend_ids": sorted(self.backends[module]),
                "call_count": self.calls[module],
                "implementations": sorted(self.kinds[module]),
                "installed_processes": len(self.ranks[module]),
                **given[module],
            }
            for module in MODULES
        }
        versions = {package: sorted(own) for package, own in self.versions.items()}
        return {"kernel_builds": sorted(self.builds), "modules": modules, "readback_count": self.count, "versions": versions}


def _forwards(own: RunFiles, number: int, stage: str, layout: dict[str, Any]) -> list[int] | None:
    """Of each rank in one iteration."""
    steps = iterations(own.run)[number - 1]
    size, updates = int(own.run["steps"][steps[0]][BATCH]), len(steps)
    if stage == "train":
        return [2 * updates * micro_batches(layout, size)] * world_size(own.run)
    if stage == "ref_logprob":
        return [micro_batches(layout, size * updates)] * world_size(own.run)
    source = own.sources.get((number, None, "tokens"))
    lengths = source and own.attempt(lambda: source.numbers("lengths", "int32"))
    prompts = source and own.attempt(lambda: source.numbers("prompt_lengths", "int32"))
    if not lengths or not prompts:
        return None
    responses, ranks, (_, _, dp) = [a - b for a, b in zip(lengths, prompts)], rollout_size(layout), mesh(layout, "rollout")
    counts = []
    for d in (rank * dp // ranks for rank in range(ranks)):  # data parallel ranks vary slowest
        first, stop = len(responses) * d // dp, len(responses) * (d + 1) // dp
        counts.append(decode_steps(responses[first:stop], layout["rollout"]["batch_size"]))
    return counts

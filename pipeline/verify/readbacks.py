"""What the processes reported that they ran: the kernels of the case, on every process, and calls as often as the layout implies."""

from __future__ import annotations

from typing import Any

from .checks import Checks
from .form import is_ours
from .layouts import micro_batches, rollout_size, world_size
from .metrics import BATCH, iterations

MODULES = ("attention", "ffn", "logp")
TRAINING, REFERENCE, ROLLOUT = "deepspeed/training", "lockstep/reference", "lockstep/rollout"
KINDS = {"R": "lockstep", "P": "torch"}
BACKENDS = {
    ("attention", "lockstep"): "lockstep.attention.tree.v1",
    ("ffn", "lockstep"): "lockstep.ffn.tree.v1",
    ("logp", "lockstep"): "lockstep.linear_logp.tree.v1",
    ("attention", "torch"): "torch.nn.functional.scaled_dot_product_attention",
    ("ffn", "torch"): "torch.nn.functional.linear",
    ("logp", "torch"): "torch.log_softmax",
}
BUILDS = {"auto": ("cpu.avx512", "cpu.avx2", "cpu.scalar")}


def check_readbacks(report: dict[str, Any], checks: Checks) -> None:
    for run in report["runs"]:
        section, place = run["validation"]["runtime_readbacks"], f"{run['run_id']}: runtime_readbacks"
        checks.equal(f"{place}.passed", section["passed"], not section["errors"])
        checks.that(section["frameworks"], place, "no framework reported anything")
        for name, framework in section["frameworks"].items():
            _check_framework(framework, f"{place}.{name}", checks, section["passed"])
            if is_ours(report):
                _check_case(report["case"], name, framework, f"{place}.{name}", checks, section["passed"])
        if is_ours(report) and section["passed"]:
            _check_counts(run, section["frameworks"], place, checks)
            _check_environment(report, run, section["frameworks"], place, checks)
    if not is_ours(report):
        _check_published(report, checks)
    elif all(run["validation"]["passed"] for run in report["runs"]):
        reported = {tuple(own["versions"]) for run in report["runs"] for own in _frameworks(run).values()}
        checks.that(len(reported) == 1, "runtime_readbacks: versions", "are not of the same packages everywhere")


def _frameworks(run: dict[str, Any]) -> dict[str, Any]:
    return run["validation"]["runtime_readbacks"]["frameworks"]


def _check_framework(framework: dict[str, Any], place: str, checks: Checks, passed: bool) -> None:
    count = framework["readback_count"]
    cases = {module["case_id"] for module in framework["modules"].values()}
    checks.that(len(cases) == 1, place, f"modules of several cases: {sorted(cases)}")
    for name, module in framework["modules"].items():
        where = f"{place}.{name}"
        checks.that(module["installed_processes"] <= count, f"{where}.installed_processes", "are more than there are readbacks")
        if passed:
            checks.that(len(module["backend_ids"]) == 1 and module["call_count"] > 0, where, "ran several backends, or none")
            checks.equal(f"{where}.implementations", module["implementations"], [module["expected_implementation"]])
            checks.that(module["installed_processes"] > 0, f"{where}.installed_processes", "are none")


def case_of(case: str, module: str) -> str:
    """R/P+ffn=R/R: the module's own case, or that of all."""
    whole, *own = case.split("+")
    return dict(part.split("=") for part in own).get(module, whole)


def _check_case(case: str, name: str, framework: dict[str, Any], place: str, checks: Checks, passed: bool) -> None:
    for module, own in framework["modules"].items():
        training, rollout = case_of(case, module).split("/")
        kind = KINDS[rollout if name == ROLLOUT else training]
        checks.equal(f"{place}.{module}.case_id", own["case_id"], case)
        checks.equal(f"{place}.{module}.expected_implementation", own["expected_implementation"], kind)
        if passed:
            checks.equal(f"{place}.{module}.backend_ids", own["backend_ids"], [BACKENDS[module, kind]])


def _check_counts(run: dict[str, Any], frameworks: dict[str, Any], place: str, checks: Checks) -> None:
    """Processes and calls, from the layout and the number of samples; the rollout's calls depend on every length, which are not here."""
    layout, number = run["execution"]["layout"], len(iterations(run))
    ranks = {TRAINING: world_size(run), REFERENCE: world_size(run), ROLLOUT: rollout_size(layout)}
    updates = [(len(steps), int(run["steps"][steps[0]][BATCH])) for steps in iterations(run)]
    forwards = {
        TRAINING: ranks[TRAINING] * sum(2 * n * micro_batches(layout, size) for n, size in updates),
        REFERENCE: ranks[REFERENCE] * sum(micro_batches(layout, n * size) for n, size in updates),
    }
    layers = set()
    for name, framework in frameworks.items():
        calls = {module: own["call_count"] for module, own in framework["modules"].items()}
        checks.equal(f"{place}.{name}.readback_count", framework["readback_count"], ranks[name] * number)
        for module, own in framework["modules"].items():
            checks.equal(f"{place}.{name}.{module}.installed_processes", own["installed_processes"], ranks[name])
        if name in forwards:
            checks.equal(f"{place}.{name}.logp.call_count", calls["logp"], forwards[name])
        for module in ("attention", "ffn"):
            quotient, rest = divmod(calls[module], max(1, calls["logp"]))
            checks.that(rest == 0, f"{place}.{name}.{module}.call_count", "is no multiple of the forwards, which logp counts")
            layers.add(quotient)
    checks.that(len(layers) == 1, place, f"attention and ffn were called as if by models of different depths: {sorted(layers)}")


def _check_environment(report: dict[str, Any], run: dict[str, Any], frameworks: dict[str, Any], place: str, checks: Checks) -> None:
    packages = (report["environment"] or {}).get("packages") or {}
    wanted = run["execution"]["launch"]["kernel_build"]
    for name, framework in frameworks.items():
        builds = framework["kernel_builds"]
        checks.that(len(builds) == 1, f"{place}.{name}.kernel_builds", "are several, or none")
        checks.that(
            set(builds) <= set(BUILDS.get(wanted, (f"cpu.{wanted}",))), f"{place}.{name}.kernel_builds", f"are not as asked for, {wanted}"
        )
        for package, versions in framework["versions"].items():
            checks.that(len(versions) == 1, f"{place}.{name}.versions.{package}", "are several, or none")
            if package in packages:
                checks.equal(f"{place}.{name}.versions.{package}", versions, [packages[package]])


def _check_published(report: dict[str, Any], checks: Checks) -> None:
    """The published report names no layout, but its runs have the same model, ranks and tokens, so their readbacks are alike."""
    first = report["runs"][0]["validation"]
    for run in report["runs"]:
        v, place = run["validation"], f"{run['run_id']}: validation"
        for name in ("cudagraph", "group", "runtime_readbacks", "schema_version"):
            checks.equal(f"{place}.{name}, as of {report['runs'][0]['run_id']}", v[name], first[name])
        for name, framework in v["runtime_readbacks"]["frameworks"].items():
            for module, own in framework["modules"].items():
                where = f"{place}.{name}.{module}"
                checks.equal(f"{where}.installed_processes", own["installed_processes"], framework["readback_count"])
                checks.that(
                    own["call_count"] % framework["modules"]["logp"]["call_count"] == 0,
                    f"{where}.call_count",
                    "is no multiple of the forwards",
                )

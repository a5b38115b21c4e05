"""The one command: compose the configuration, check it, register its runs in params.yaml, let DVC run what changed, say the verdict.

`python -m pipeline --help` explains it. Hydra only composes and sweeps: every job of a multirun adds its overrides to a list, and when all
of them are known to be valid, one `dvc repro` an experiment runs them, one after another on the same fork server; --jobs has them made side
by side before. Hydra's launchers have nothing to do.
"""

from __future__ import annotations

import argparse
import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pipeline import compose, environment, parallel, registry, repro
from pipeline.config import experiment_half
from pipeline.digest import sha256_json
from pipeline.errors import LayoutError, UserError
from pipeline.registry import Run


def main() -> int:
    if sys.argv[1:2] == ["--forget"]:
        return forget(sys.argv[2:])
    own, sys.argv[1:] = options().parse_known_args()
    try:
        if ahead := own.jobs != 1 or own.launcher != "basic":
            parallel.check(own.jobs, own.launcher)
        jobs = command_lines()
        if not jobs:
            return 0  # --cfg, --info: printed already
        runs = composed(jobs)
    except UserError as error:
        return report(error)
    environment.refresh()
    experiments = list(dict.fromkeys(run.experiment for run in runs))
    print(f"params.yaml: {', '.join(run.key for run in runs)}", file=sys.stderr)
    if own.register:
        return 0
    try:
        fresh = {run.experiment for run in runs if run.config.verify == "fresh"}
        if ahead:
            if fresh:
                raise UserError("verify=fresh: executes every stage in this clone; leave --jobs and --launcher out")
            parallel.run_ahead([run.key for run in runs], own.jobs, own.launcher)
        code = max([repro.verdict_of(key, fresh=key in fresh) for key in experiments])
        for keys in case_sweeps(runs):
            repro.print_case_matrix(keys)
        return code
    except UserError as error:
        return report(error)


def options() -> argparse.ArgumentParser:
    """Ours beside Hydra's; its --help names them."""
    parser = argparse.ArgumentParser(prog="python -m pipeline", add_help=False, allow_abbrev=False)
    parser.add_argument("--register", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--launcher", default="basic")
    return parser


def forget(keys: list[str]) -> int:
    """Takes runs, or whole experiments, out of params.yaml; their files stay."""
    try:
        known = registry.load(check=False)
        for key in keys:
            if key not in (*known.run_keys(), *known.experiment_keys()):
                raise UserError(f"--forget {key}: not in params.yaml; there are {', '.join((*known.experiment_keys(), *known.run_keys()))}")
        with compose.composing():
            registry.upsert([], compose.compose_run, forget=keys)
    except UserError as error:
        return report(error)
    return 0


def command_lines() -> list[list[str]]:
    """The overrides of each job: one, or with -m one for each combination. Exits by itself after --help."""
    jobs: list[list[str]] = []

    @hydra.main(version_base="1.3", config_path=str(compose.CONF), config_name="config")
    def collect(_: DictConfig) -> None:
        jobs.append(list(HydraConfig.get().overrides.task))

    compose.register_schema()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, instead of printing and exiting with its own code
    sys.argv[1:] = multirun_first(without_swept_layouts(sys.argv[1:]))
    with compose.one_line_errors():
        collect()
    return jobs


def multirun_first(args: list[str]) -> list[str]:
    """`experiment=smollm2 -m layout=tp3`: argparse takes overrides on one side of a flag only, users write them on both."""
    return sorted(args, key=lambda arg: arg not in ("-m", "--multirun"))


def without_swept_layouts(args: list[str]) -> list[str]:
    """-m layout.tp=2,3 sweeps degrees: the preset's list of layouts must not multiply them."""
    return [*args, "layout=tp1cp1dp1"] if swept_degrees(args) and not any(arg.startswith("layout=") for arg in args) else args


def swept_degrees(args: list[str]) -> bool:
    """Does the command line give single degrees, rather than named layouts?"""
    return any(arg.startswith(("layout.tp=", "layout.cp=", "layout.dp=", "layout.zero=", "layout.rollout.")) for arg in args)


def composed(jobs: list[list[str]]) -> list[Run]:
    """All runs, registered. Raises the first error, after naming the others; then nothing has been written."""
    runs: dict[str, Run] = {}
    errors: list[UserError] = []
    with compose.composing():
        for overrides in jobs:
            try:
                run = compose.compose_run(overrides)
                runs[run.key] = run
            except UserError as error:
                errors.append(error)
        if runs:  # a product of degrees holds combinations that the model can't have
            for error in (dropped := [error for error in errors if isinstance(error, LayoutError) and swept_degrees(jobs[0])]):
                print(f"left out: {error}", file=sys.stderr)
            errors = [error for error in errors if error not in dropped]
        for error in errors[1:]:
            report(error)
        if errors:
            raise errors[0]
        with repro.one_at_a_time():  # running stages read params.yaml, too
            registry.upsert(runs.values(), compose.compose_run)
    return list(runs.values())


def case_sweeps(runs: list[Run]) -> list[list[str]]:
    """Experiments of the command that differ in their kernels only, where R/R is among them."""
    groups: dict[str, dict[str, str]] = {}
    for run in runs:
        rest = {key: value for key, value in experiment_half(run.config).items() if key != "kernels"}
        groups.setdefault(sha256_json(rest), {})[run.config.kernels.case_id] = run.experiment
    return [list(group.values()) for group in groups.values() if len(group) > 1 and "R/R" in group]


def report(error: UserError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

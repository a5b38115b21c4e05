"""Runs to break: a scratch copy of an experiment's files, the checker on it, and the way back to what it was."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from pipeline import registry
from pipeline.config import Config, experiment_digest
from pipeline.digest import read_json
from pipeline.evidence.chain import RunFiles
from pipeline.evidence.compare import ORACLE_LAYOUT, ExperimentId, RunRecord, compare
from pipeline.evidence.validation import validate, write_validation
from pipeline.layout import layout_name
from pipeline.paths import ROOT, Paths
from stages import compare as compare_stage
from stages import validate as validate_stage
from tests.mutations.verdicts import Found
from tests.synthetic_runs import LAYOUTS, make_experiment

REAL = "tiny"  # the experiment whose runs are taken where it has been run


class Runs:
    """Two runs of one experiment: the oracle, and the one that is broken. Files are copies: DVC's are links into its cache."""

    def __init__(self, pristine: Paths, configs: Mapping[str, Config], scratch: Path, kind: str):
        self.pristine, self.configs, self.paths, self.kind = pristine, dict(configs), Paths(scratch), kind
        self.oracle = next(key for key, cfg in self.configs.items() if _layout(cfg) == ORACLE_LAYOUT)
        self.other = next(key for key in self.configs if key != self.oracle)
        self.checkpoint = self.configs[self.oracle].checkpoint.name
        self.folders = [*(pristine.run(key) for key in self.configs), pristine.checkpoint(self.checkpoint)]
        for folder in self.folders:
            self._copy(folder)
        self._validations = {key: self._validate(key) for key in self.configs}

    def _copy(self, folder: Path) -> None:
        shutil.copytree(folder, self.paths.root / folder.relative_to(self.pristine.root))

    def files(self, key: str) -> RunFiles:
        return RunFiles.of(self.configs[key], key, self.paths)

    def iterations(self) -> range:
        return range(1, self.configs[self.oracle].iterations + 1)

    def restore(self, *changed: Path) -> None:
        """These files, or everything, as they were."""
        for path in changed:
            shutil.copy(self.pristine.root / path.relative_to(self.paths.root), path)
        for folder in () if changed else self.folders:
            shutil.rmtree(self.paths.root / folder.relative_to(self.pristine.root), ignore_errors=True)
            self._copy(folder)

    # --- the checker ------------------------------------------------------------------------------------------------------------
    def check(self, validated: Iterable[str]) -> Found:
        """Validates the runs again that are named, and compares all of them."""
        validations = self._validations | {key: self._validate(key) for key in validated}
        runs = [RunRecord(self.files(key), validations[key], {}, {}) for key in self.configs]
        return found_in(compare(runs, self._identity()))

    def check_by_stages(self, validated: Iterable[str]) -> Found:
        """The same by the stages validate and compare, which write and check every report."""
        folder, validated = self.paths.root / "reports", set(validated)
        paths = {key: folder / f"{key}.json" for key in self.configs}
        for key, path in paths.items():
            if key in validated:
                validate_stage.run(self.configs[key], key, self.paths, path)
            else:
                write_validation(path, self._validations[key])
        found = found_in(compare_stage.run(self.configs, paths, self._identity(), self.paths, folder))
        shutil.rmtree(folder)
        return found

    def _validate(self, key: str) -> dict:
        return validate(self.configs[key], self.files(key))

    def _identity(self) -> ExperimentId:
        cfg = self.configs[self.oracle]
        return ExperimentId(cfg.name, experiment_digest(cfg), cfg.kernels.case_id)


def found_in(comparison: dict) -> Found:
    errors = [error for run in comparison["runs"] for error in run["validation"]["errors"]]
    return Found(comparison["verdict"], comparison["first_difference"], [*comparison["reasons"], *errors])


def _layout(cfg: Config) -> str:
    return layout_name(cfg.layout.tp, cfg.layout.cp, cfg.layout.dp, cfg.layout.zero)


def synthetic_runs(folder: Path, layout: str = "cp2dp2", num_updates: int = 1) -> Runs:
    """Runs made in milliseconds, of few and small arrays."""
    experiment = make_experiment(folder / "pristine", {name: LAYOUTS[name] for name in (ORACLE_LAYOUT, layout)}, num_updates=num_updates)
    return Runs(experiment.paths, experiment.configs, folder / "scratch", f"synthetic runs of {ORACLE_LAYOUT} and {layout}")


def real_runs(folder: Path, root: Path = ROOT, experiment: str = REAL) -> Runs | None:
    """The oracle's run and the last layout's, where that experiment has been run in the project `root` and its runs are equal."""
    paths = Paths(root)
    if not paths.comparison(experiment).exists() or read_json(paths.comparison(experiment))["verdict"] != "identical":
        return None
    known = registry.load(root, check=False)
    if experiment not in known.experiment_keys():
        return None
    configs = {key: known.run(key) for key in known.experiment(experiment).runs if paths.run(key).is_dir()}
    oracles = [key for key, cfg in configs.items() if _layout(cfg) == ORACLE_LAYOUT]
    others = [key for key in configs if key not in oracles]
    if not oracles or not others:
        return None
    chosen = oracles[0], others[-1]
    return Runs(paths, {key: configs[key] for key in chosen}, folder / "scratch", f"runs {chosen[0]} and {chosen[1]}")

"""A report against the folders that it was made from: a whole project, or single runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import project as around
from .checks import Checks
from .folders import Folder
from .run_claims import check_claims, check_recorded, check_token_logprobs
from .run_files import RunFiles
from .run_links import check_links
from .run_metrics import check_metrics
from .run_readbacks import check_readbacks
from .run_sections import check_sections
from .sidecars import check_sidecars


def check_project(report: dict[str, Any], root: Path, checks: Checks) -> None:
    """All runs of the report, below a project folder."""
    project = Folder(root)
    settings = around.settings_of(report, project, checks)
    around.check_environment(report, project, checks)
    logs = _below(project, checks, "logs")
    owns, cache = [], {}
    for run in report["runs"]:
        try:
            folder = project.below("runs", run["run_id"])
        except (OSError, ValueError) as error:
            checks.that(False, run["run_id"], str(error))
            continue
        own = RunFiles(run, folder, checks, cache)
        own.load()
        owns.append(own)
        _add_checkpoint(own, project, settings.get(run["run_id"]), checks)
    _check_runs(report, owns, settings, checks)
    if len(owns) == len(report["runs"]):
        checks.follow("sections", check_sections, report, owns, checks)
    for own in owns:
        checkpoint = own.sources[0, None, "weights"].folder if (0, None, "weights") in own.sources else None
        if checkpoint is not None and own.whole:
            checks.follow(own.key, around.check_model_files, own, checkpoint, checks)
        checks.follow(f"{own.key}: performance", around.check_times, own, logs, checkpoint, checks)
    commands = {command for own in owns for command in around.fresh_command(own, logs)}
    fresh = len(commands) == 1 and None not in commands
    checks.that(report["verification"] == "cached" or fresh, "verification", "is fresh, but the logs name no one command that executed all")


def check_folders(report: dict[str, Any], folders: list[Path], checks: Checks) -> None:
    """Single runs, each in a folder of the run's name."""
    runs = {run["run_id"]: run for run in report["runs"]}
    owns, cache = [], {}
    for path in folders:
        key = path.resolve().name
        own = RunFiles(runs[key], Folder(path, f"{key}/"), checks, cache)
        own.load()
        owns.append(own)
    _check_runs(report, owns, {}, checks)


def _below(project: Folder, checks: Checks, name: str) -> Folder | None:
    try:
        return project.below(name)
    except (OSError, ValueError) as error:
        checks.note(f"what {name}/ says: {error}")
        return None


def _add_checkpoint(own: RunFiles, project: Folder, settings: dict[str, Any] | None, checks: Checks) -> None:
    checkpoints = _below(project, checks, "runs")
    folder = own.attempt(lambda: checkpoints.below("checkpoints")) if checkpoints else None
    if folder is not None:
        own.add_checkpoint(folder, settings["checkpoint"]["name"] if settings else None)


def _check_runs(report: dict[str, Any], owns: list[RunFiles], settings: dict[str, Any], checks: Checks) -> None:
    for own in owns:
        checks.follow(f"{own.key}: links", check_links, own, [other for other in owns if other is not own], checks)
        checks.follow(f"{own.key}: steps", check_claims, own, checks)
        if own.whole:
            checks.follow(f"{own.key}: recorded hashes", check_recorded, own, checks)
            checks.follow(f"{own.key}: sidecars", check_sidecars, own, checks)
            checks.follow(f"{own.key}: readbacks", check_readbacks, own, checks)
            checks.follow(f"{own.key}: metrics", check_metrics, own, settings.get(own.key), checks)
        else:
            checks.note(f"{own.key}: sidecars, readbacks and recorded hashes, and metrics computed again: its validation failed")
        if own.key == report["oracle"]:
            checks.follow("token_logprobs", check_token_logprobs, report, own, checks)
    if not any(own.key == report["oracle"] for own in owns) and report["token_logprobs"]:
        checks.note("token_logprobs, which are of the oracle's folder")
    given = {own.key for own in owns}
    for run in report["runs"]:
        if run["run_id"] not in given:
            checks.note(f"{run['run_id']}: its files, as no folder of it is given")

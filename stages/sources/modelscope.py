"""Checkpoints from ModelScope, by its own package (an optional extra)."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import Checkpoint
from pipeline.errors import MissingPrerequisite
from stages.sources.hub import check_pinned
from stages.sources.local import PUBLISHED_FILES


def download_modelscope(checkpoint: Checkpoint, download: Path) -> None:
    """Download the published files of `repo` at `revision` into `download`.

    Raises MissingPrerequisite when the package `modelscope` is absent, the server can't be reached or doesn't have the revision.
    """
    repo = check_pinned(checkpoint)
    try:
        from modelscope.hub.snapshot_download import snapshot_download  # pyright: ignore[reportMissingImports]  # an optional extra
    except ImportError as error:
        raise MissingPrerequisite(
            "checkpoint.source=modelscope: the package modelscope is not installed; run pip install modelscope"
        ) from error
    try:
        snapshot_download(repo, revision=checkpoint.revision, local_dir=str(download), allow_patterns=PUBLISHED_FILES)
    except Exception as error:  # the package raises its own, requests' and built-in errors, by version
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = f"checkpoint.repo={checkpoint.repo}, revision={checkpoint.revision}"
        raise MissingPrerequisite(f"{where}: ModelScope download failed ({reason}); check both and the network") from error

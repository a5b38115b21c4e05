"""Checkpoints from the Hugging Face hub: pinned to a commit, safetensors only, no code."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

from pipeline.config import Checkpoint
from pipeline.errors import MissingPrerequisite, UserError
from pipeline.progress import Progress
from stages.sources.local import PUBLISHED_FILES


def check_pinned(checkpoint: Checkpoint) -> str:
    """The repository's name. Raises UserError unless repo is "owner/name" and revision a whole commit hash: branches and tags move."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", checkpoint.repo or ""):
        raise UserError(f"checkpoint.repo={checkpoint.repo}: source {checkpoint.source} needs owner/name")
    if not re.fullmatch(r"[0-9a-f]{40}", checkpoint.revision or ""):
        raise UserError(f"checkpoint.revision={checkpoint.revision}: give the whole commit hash (40 hex digits); a branch or tag can move")
    return str(checkpoint.repo)


def download_hub(checkpoint: Checkpoint, download: Path) -> None:
    """Download the published files of `repo` at `revision` into `download`; what an earlier try left there is taken up again.

    The endpoint is HF_ENDPOINT or huggingface.co. Raises MissingPrerequisite when it can't be reached or doesn't have the revision.
    """
    repo = check_pinned(checkpoint)
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(
            repo,
            revision=checkpoint.revision,
            local_dir=download,
            allow_patterns=PUBLISHED_FILES,
            tqdm_class=progress_class(),
            endpoint=os.environ.get("HF_ENDPOINT"),
        )
    except Exception as error:  # its own errors, its HTTP library's and built-in ones: by version
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = f"checkpoint.repo={checkpoint.repo}, revision={checkpoint.revision}"
        raise MissingPrerequisite(
            f"{where}: download failed ({reason}); check both, HF_TOKEN for gated models, HF_ENDPOINT and the network"
        ) from error


def progress_class() -> Any:
    """A tqdm for libraries that draw their own bars: theirs on a terminal, elsewhere one line per 10 % of the bytes and no redrawing."""
    from huggingface_hub.utils import tqdm

    if sys.stderr.isatty():
        return tqdm

    class LineTqdm(tqdm):
        """Keeps tqdm's interface, draws nothing, and reports what it counts in bytes."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs |= {"disable": False, "file": io.StringIO()}  # a disabled tqdm doesn't count
            self._lines = Progress("download", 0, unit="B")
            self._guard = threading.Lock()
            super().__init__(*args, **kwargs)

        def display(self, *_: Any, **__: Any) -> None:
            return None

        def update(self, n: float | None = 1) -> bool | None:
            if self.unit == "B" and str(self.desc).startswith("Reconstructing"):
                with self._guard:
                    self._lines.grow(int(self.total or 0) - self._lines.total)  # files add to it as they begin
                    self._lines.advance(int(n or 0))
            return super().update(n)

    return LineTqdm

"""How a stage that fails below DVC tells the command above DVC why: `dvc repro` exits with 255 whatever the stage returned."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.paths import ROOT


@dataclass(frozen=True)
class Failure:
    stage: str
    key: str
    iteration: int | None
    exit_code: int
    message: str

    @property
    def where(self) -> str:
        return f"{self.stage} {self.key}" + (f" --iteration {self.iteration}" if self.iteration else "")


def _file(root: Path) -> Path:
    return root / "logs" / "failure.json"


def record(failure: Failure, root: Path = ROOT) -> None:
    """The stage's last act before it exits with that code."""
    path = _file(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".failure.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(asdict(failure), indent=1) + "\n")
    temporary.replace(path)


def clear(root: Path = ROOT) -> None:
    _file(root).unlink(missing_ok=True)


def last(root: Path = ROOT) -> Failure | None:
    """What was recorded since `clear`."""
    path = _file(root)
    return Failure(**json.loads(path.read_text())) if path.exists() else None

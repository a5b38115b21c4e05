"""Files below a folder, opened so that no name can lead out of it: names are plain, and nothing on the way is a symbolic link."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

from . import document

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


class Folder:
    """A folder of the user's; what lies below it is as untrusted as the report."""

    def __init__(self, root: Path, shown: str = "") -> None:
        self.root, self.shown = root, shown

    def below(self, *names: str) -> Folder:
        """A folder inside. ValueError for a name that is no plain one, a symbolic link, or something that is no folder."""
        path, shown = self.root, self.shown
        for name in names:
            if not NAME.fullmatch(name):
                raise ValueError(f"{shown}{json.dumps(name)}: is no plain name of a file")
            path, shown = path / name, f"{shown}{name}/"
            mode = os.lstat(path).st_mode if os.path.lexists(path) else None
            if mode is None:
                raise FileNotFoundError(f"{shown.rstrip('/')}: is missing")
            if not stat.S_ISDIR(mode):
                kind = "a symbolic link" if stat.S_ISLNK(mode) else "no folder"
                raise ValueError(f"{shown.rstrip('/')}: is {kind}")
        return Folder(path, shown)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.root))

    def open(self, name: str) -> BinaryIO:
        """A regular file inside, to be read."""
        if not NAME.fullmatch(name):
            raise ValueError(f"{self.shown}{json.dumps(name)}: is no plain name of a file")
        try:
            descriptor = os.open(self.root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe must not block us
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.shown}{name}: is missing") from None
        except OSError as error:
            link = os.path.islink(self.root / name)
            raise ValueError(f"{self.shown}{name}: is a symbolic link" if link else f"{self.shown}{name}: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ValueError(f"{self.shown}{name}: is no regular file")
        return os.fdopen(descriptor, "rb")

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object. ValueError, with the file's name, for anything else."""
        try:
            value = document.parse(self.read(name))
        except FileNotFoundError:
            raise
        except ValueError as error:
            raise ValueError(str(error) if self.shown and str(error).startswith(self.shown) else f"{self.shown}{name}: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{self.shown}{name}: holds no object")
        return value

"""Where the fork server of this clone listens, and the fingerprint of the code and environment it has loaded."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import UserError

PROJECT_ROOT = Path(__file__).resolve().parents[2]

_SOCKET_PATH_LIMIT = 107  # sun_path has 108 bytes with the final zero
_SOURCES = ("kernels", "stages", "pipeline")
_SOURCE_SUFFIXES = (".py", ".cpp", ".h")
# Read by libraries at import or at first use, so a running server can't take them over.
_READ_AT_IMPORT = re.compile(
    "(LOCKSTEP|DS|DEEPSPEED|PYTORCH|OMP|GOMP|KMP|MKL|OPENBLAS|DNNL|ONEDNN|ATEN|GLOO|NCCL|HF|TRANSFORMERS|TRITON|LD|MALLOC)_|TORCH|CUDA|PYTHON"
)
# Handed to each rank with its job.
_PER_JOB = {"LOCKSTEP_STARTER_PID", "LOCKSTEP_FRESH", "LOCKSTEP_THREADS", "LOCKSTEP_KERNEL_BUILD"}


def server_folder() -> Path:
    """The folder of this clone's server, private to the user. Raises UserError when somebody else prepared it."""
    name = f"lockstep-{os.getuid()}"
    clone = hashlib.sha256(os.fsencode(PROJECT_ROOT)).hexdigest()[:16]
    for base in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        folder = Path(base, name, clone)
        if base and os.path.isdir(base) and os.access(base, os.W_OK) and len(os.fsencode(folder / "socket")) <= _SOCKET_PATH_LIMIT:
            _private(folder.parent)
            return _private(folder)
    raise UserError("no folder for the fork server's socket: set XDG_RUNTIME_DIR or TMPDIR to a writable folder with a short path")


def _private(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise UserError(
                f"{folder} is a link, a file or somebody else's folder: remove it, or set XDG_RUNTIME_DIR to your own"
            ) from None
        if found.st_mode & 0o077:
            folder.chmod(0o700)
    return folder


def fingerprint(environment: Mapping[str, str]) -> str:
    """sha256 of what a server has loaded: sources, locked requirements, interpreter, installed packages, and the variables above."""
    digest = hashlib.sha256()

    def add(*parts: str | bytes) -> None:
        for part in parts:
            data = os.fsencode(part) if isinstance(part, str) else part
            digest.update(len(data).to_bytes(8, "little") + data)

    add(sys.executable, sys.version)
    packages = sysconfig.get_path("purelib")
    add(str(os.stat(packages).st_mtime_ns) if os.path.isdir(packages) else "")  # moves when a package is installed or removed
    for name in sorted(environment):
        if _READ_AT_IMPORT.match(name) and name not in _PER_JOB:
            add(name, environment[name])
    for path in _source_files():
        try:
            add(str(path.relative_to(PROJECT_ROOT)), path.read_bytes())
        except FileNotFoundError:  # an editor replaced it this moment
            add(str(path.relative_to(PROJECT_ROOT)), "absent")
    return digest.hexdigest()


def _source_files() -> list[Path]:
    found = [PROJECT_ROOT / "requirements.lock"]
    for top in _SOURCES:
        for folder, folders, names in os.walk(PROJECT_ROOT / top):
            folders[:] = [name for name in folders if not name.startswith((".", "_"))]  # no __pycache__, no built libraries
            found += [Path(folder, name) for name in names if name.endswith(_SOURCE_SUFFIXES)]
    return sorted(found)

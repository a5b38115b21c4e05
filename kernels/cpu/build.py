"""Builds the C++ kernels at first use and loads them. `python -m kernels.cpu.build` builds every build this machine can run.

One shared library per *build*: `avx512`, `avx2`, and `scalar` (no AVX and no FMA instructions: slow, portable, for certification).
All give the same bits; which one runs is chosen from the processor's flags, by `select`, or by LOCKSTEP_KERNEL_BUILD.
The compiler is LOCKSTEP_CXX (a command line), else g++, clang++, or the `ziglang` package; libraries are kept in `_build/` beside this file
(LOCKSTEP_BUILD_DIR moves them), under a hash of sources, flags and compiler.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parent
BUILDS = ("avx512", "avx2", "scalar")
_COMMON_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-Wno-psabi")
_BUILD_FLAGS = {
    "avx512": (
        "-mavx2",
        "-mfma",
        "-mavx512f",
        "-mavx512dq",
        "-mavx512bw",
        "-mavx512vl",
        "-mprefer-vector-width=512",
        "-DLOCKSTEP_LANES=16",
    ),
    "avx2": ("-mavx2", "-mfma", "-DLOCKSTEP_LANES=8"),
    "scalar": ("-DLOCKSTEP_LANES=4",),
}
_CPU_FLAGS = {"avx512": {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx2", "fma"}, "avx2": {"avx2", "fma"}, "scalar": set()}


class KernelError(RuntimeError):
    """The kernels can't be built or loaded; the message is one line with a remedy."""


class CompilerNotFound(KernelError):
    """There is no C++ compiler."""


class Library(ctypes.CDLL):
    """The loaded library. Calls take tensors (their data pointer), Python ints (as 64 bits), floats (as double), None and ctypes values.

    The first call of a function fixes the kinds of its arguments. A caller to whom half a microsecond matters passes `data_ptr()` itself:
    a function that has met no tensor on its first call is called directly from then on.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = super().__getattr__(name)

        def with_tensors(*args: Any) -> Any:
            return function(*[a.data_ptr() if hasattr(a, "data_ptr") else a for a in args])

        def first_call(*args: Any) -> Any:
            function.argtypes = [_argument_type(a) for a in args]
            call = with_tensors if any(hasattr(a, "data_ptr") for a in args) else function
            setattr(self, name, call)
            return call(*args)

        setattr(self, name, first_call)
        return first_call


def _argument_type(value: Any) -> Any:
    """c_void_p for 64-bit integers as well as pointers: ctypes converts it in half the time, and both travel in the same registers.

    A tensor is known by its `data_ptr`, without importing torch: the build command and the checks need none.
    """
    if isinstance(value, int | ctypes.Array) or value is None or hasattr(value, "data_ptr"):
        return ctypes.c_void_p
    return ctypes.c_double if isinstance(value, float) else type(value)


_selected: str | None = None
_library: Library | None = None
_loaded: str = ""


def select(name: str) -> None:
    """Chooses the build ("auto" or one of BUILDS) before the first call of `library`. ValueError for another name or one the processor
    can't run; KernelError when a different build is loaded already."""
    global _selected
    if name not in ("auto", *BUILDS):
        raise ValueError(f"kernel build {name!r}: expected auto or one of {', '.join(BUILDS)}")
    if name != "auto" and name not in runnable_builds():
        raise ValueError(f"kernel build {name!r}: this processor runs only {', '.join(runnable_builds())}")
    if _library is not None and name not in ("auto", _loaded):
        raise KernelError(f"kernel build {name!r}: {_loaded} is loaded already; choose the build before the first kernel call")
    _selected = name


def library() -> Library:
    """The kernels' library, built if need be. CompilerNotFound or KernelError when that fails."""
    global _library, _loaded
    if _library is None:
        name = _chosen()
        path = build(name)
        _library, _loaded = load(path), name
        _library.lockstep_set_threads(int(os.environ.get("LOCKSTEP_THREADS", "1")))
    return _library


def load(path: Path) -> Library:
    """A library by path, beside the one of `library()`."""
    return Library(str(path))


def build_id() -> str:
    """What runs, or would run, for readbacks: "cpu.avx512"."""
    return f"cpu.{_loaded or _chosen()}"


def set_threads(n: int) -> None:
    """Kernel threads of this process (>= 1); changes no bit. Threads start with the first call large enough to share."""
    if n < 1:
        raise ValueError(f"kernel threads: {n} is not positive")
    library().lockstep_set_threads(n)


def _chosen() -> str:
    name = _selected or os.environ.get("LOCKSTEP_KERNEL_BUILD") or "auto"
    if name == "auto":
        return runnable_builds()[0]
    if name not in runnable_builds():
        raise KernelError(f"LOCKSTEP_KERNEL_BUILD={name}: this processor runs {', '.join(runnable_builds())}; unset it or name one of them")
    return name


@functools.cache
def runnable_builds() -> list[str]:
    """The builds that this processor can run, fastest first."""
    flags: set[str] = set()
    if _is_x86():
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            flags = set(next((line for line in lines if line.startswith("flags")), "").split())
        except OSError:
            pass
    return [name for name in BUILDS if _CPU_FLAGS[name] <= flags]


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


# --- building ----------------------------------------------------------------------------------------------------------------
def compiler() -> list[str]:
    """The C++ compiler's command line. CompilerNotFound when there is none."""
    if chosen := os.environ.get("LOCKSTEP_CXX"):
        try:
            command = shlex.split(chosen)
        except ValueError:  # an open quotation
            command = []
        if not command or shutil.which(command[0]) is None:
            raise CompilerNotFound(f"LOCKSTEP_CXX={chosen}: no such program; unset it or name a C++17 compiler")
        return command
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    raise CompilerNotFound("no C++ compiler: install g++ or clang++ with the system's package manager, or `pip install ziglang`")


def build(name: str) -> Path:
    """Path of the shared library of a build; compiled unless it exists. Safe against concurrent builders."""
    command = [*compiler(), *_COMMON_FLAGS, *_BUILD_FLAGS[name]]
    if "ziglang" in command or Path(command[0]).name == "zig":
        # Unless told not to, zig takes the host's whole instruction set and adds checks for undefined behaviour.
        command += ["-march=x86_64" if _is_x86() else "-mcpu=baseline", "-fno-sanitize=all"]
    units, headers = sorted(SOURCES.glob("*.cpp")), sorted(SOURCES.glob("*.h"))
    common = _digest(repr(command), _compiler_stamp(command[0]), *(path.read_text() for path in headers))
    objects = {path: f"{path.stem}.{name}.{_digest(common, path.read_text())[:16]}.o" for path in units}
    folder = _build_folder()
    target = folder / _digest(*objects.values())[:16] / f"lockstep.{name}.so"
    if target.exists():
        return target
    with _locked(folder / f"{name}.lock"):
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            for source, file in objects.items():
                if not (folder / file).exists():
                    _compile([*command, "-c", str(source)], folder / file)
            _compile([*command, "-shared", *(str(folder / file) for file in objects.values())], target)
            _drop_stale(folder, name, set(objects.values()))
    return target


def _compile(command: list[str], target: Path) -> None:
    """Runs a compiler command into a temporary file, then renames it to `target`."""
    temporary = target.with_name(f".{os.getpid()}.{target.name}")
    result = subprocess.run([*command, "-o", str(temporary)], capture_output=True, text=True)
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines() or ["no message"]
        raise KernelError(f"the kernels do not compile: {errors[0]} (command: {shlex.join(command)})")
    temporary.replace(target)


def _drop_stale(folder: Path, name: str, keep: set[str]) -> None:
    """Objects of former sources; the libraries stay, for processes that run them."""
    for path in folder.glob(f"*.{name}.*.o"):
        if path.name not in keep:
            path.unlink(missing_ok=True)


def _build_folder() -> Path:
    folder = Path(os.environ.get("LOCKSTEP_BUILD_DIR") or SOURCES / "_build")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise KernelError(f"{folder} is not writable ({error.strerror}): set LOCKSTEP_BUILD_DIR to a folder that is") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _compiler_stamp(program: str) -> str:
    """Identifies a compiler without starting it."""
    path = Path(shutil.which(program) or program).resolve()
    stat = path.stat()
    return f"{path} {stat.st_size} {stat.st_mtime_ns}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def main() -> None:
    for name in runnable_builds():
        print(f"{name}: building", file=sys.stderr)
        print(build(name))


if __name__ == "__main__":
    try:
        main()
    except KernelError as fault:  # `make setup` on a machine where the kernels can't be built: nothing of ours to trace
        print(f"error: {fault}", file=sys.stderr)
        sys.exit(4)

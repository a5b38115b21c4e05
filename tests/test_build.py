"""The kernel library: which compiler and build, one-line errors, rebuilding, threads, fork, and the floating-point mode."""

from __future__ import annotations

import ctypes
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels import linear
from kernels.cpu import build

TINY = 'extern "C" int answer() { return %d; }\n'


@pytest.fixture
def tiny_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one source file in place of the kernels."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tiny.cpp").write_text(TINY % 42)
    monkeypatch.setattr(build, "SOURCES", tmp_path / "source")
    monkeypatch.setenv("LOCKSTEP_BUILD_DIR", str(tmp_path / "built"))
    return tmp_path / "source"


def test_builds_once_and_again_when_a_source_changes(tiny_sources):
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build.build("scalar"), range(4)))
    assert len(paths) == 1
    path = paths.pop()
    assert build.load(path).answer() == 42
    stamp = path.stat().st_mtime_ns
    assert build.build("scalar") == path and path.stat().st_mtime_ns == stamp
    (tiny_sources / "tiny.cpp").write_text(TINY % 43)
    assert build.load(build.build("scalar")).answer() == 43
    (tiny_sources / "tiny.h").write_text("// headers count too\n")
    assert build.build("scalar") != path


def test_a_compile_error_is_one_line(tiny_sources):
    (tiny_sources / "tiny.cpp").write_text("int f( {\n")
    with pytest.raises(build.KernelError, match=r"do not compile: .*tiny\.cpp:1") as error:
        build.build("scalar")
    assert "\n" not in str(error.value)


def test_no_compiler_names_the_remedy(monkeypatch):
    monkeypatch.delenv("LOCKSTEP_CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(build.CompilerNotFound, match=r"install g\+\+ or clang\+\+ .*pip install ziglang"):
        build.compiler()
    monkeypatch.setenv("LOCKSTEP_CXX", "no-such-compiler -O1")
    with pytest.raises(build.CompilerNotFound, match="LOCKSTEP_CXX=no-such-compiler"):
        build.compiler()


def test_zig_is_the_last_resort(monkeypatch):
    monkeypatch.delenv("LOCKSTEP_CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name == "ziglang" or None)
    assert build.compiler() == [sys.executable, "-m", "ziglang", "c++"]


def test_an_unwritable_folder_names_the_remedy(tiny_sources, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_BUILD_DIR", "/proc/lockstep")
    with pytest.raises(build.KernelError, match="set LOCKSTEP_BUILD_DIR"):
        build.build("scalar")


def test_select(monkeypatch):
    build.library()
    build.select("auto")
    build.select(build.build_id().removeprefix("cpu."))
    with pytest.raises(ValueError, match="expected auto or one of avx512, avx2, scalar"):
        build.select("sse9")
    monkeypatch.setattr(build, "_loaded", "avx2")
    with pytest.raises(build.KernelError, match="before the first kernel call"):
        build.select("scalar")
    monkeypatch.setattr(build, "_library", None)
    build.select("scalar")
    assert build._chosen() == "scalar"
    monkeypatch.setattr(build, "_selected", None)
    monkeypatch.setattr(build, "runnable_builds", lambda: ["scalar"])
    with pytest.raises(ValueError, match="this processor runs only scalar"):
        build.select("avx512")
    monkeypatch.setenv("LOCKSTEP_KERNEL_BUILD", "avx512")
    with pytest.raises(build.KernelError, match="LOCKSTEP_KERNEL_BUILD=avx512"):
        build._chosen()


def test_kinds_of_arguments_are_fixed_by_the_first_call(tiny_sources):
    (tiny_sources / "tiny.cpp").write_text(
        "#include <cstdint>\n"
        'extern "C" int with_tensor(const float* p, int64_t i, double d) { return int(p ? p[i] * d : d); }\n'
        'extern "C" int plain(int64_t a, int64_t b, double d, float f) { return a == -(int64_t(1) << 40) && b == 7 ? int(d * f) : -1; }\n'
    )
    lib = build.load(build.build("scalar"))
    x = torch.tensor([1.0, 2.0, 3.0])
    assert lib.with_tensor(x, 2, 2.0) == 6 and lib.with_tensor(x, 1, 10) == 20 and lib.with_tensor(None, 0, 5.0) == 5
    for _ in range(2):
        assert lib.plain(-(1 << 40), 7, 1.5, ctypes.c_float(4.0)) == 6
    assert lib.plain(-(1 << 40), True, 1.5, ctypes.c_float(4.0)) == -1, "the control: the integers arrive whole"
    with pytest.raises(ctypes.ArgumentError):
        lib.plain(1.0, 7, 1.5, ctypes.c_float(4.0))


def test_subnormals_survive_a_caller_that_flushes_them():
    tiny, one = torch.tensor([[1e-40]]), torch.ones(1, 1)
    assert torch.set_flush_denormal(True)
    try:
        assert (tiny * 0.5).item() == 0, "the control: the caller's own mode flushes"
        kept = linear.forward(tiny, one, 1)
        assert (tiny * 0.5).item() == 0, "the mode is restored"
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(kept, tiny)


def test_threads_and_fork_change_nothing():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 300, generator=generator), torch.randn(700, 300, generator=generator)
    one = linear.forward(x, w, 128)
    with pytest.raises(ValueError, match="not positive"):
        build.set_threads(0)
    try:
        for threads in (2, 3, 2):
            build.set_threads(threads)
            assert all(torch.equal(linear.forward(x, w, 128), one) for _ in range(20))
        child = os.fork()  # the child inherits a pool without its threads
        if child == 0:
            os._exit(0 if torch.equal(linear.forward(x, w, 128), one) else 1)
        assert os.waitpid(child, 0)[1] == 0
        with ThreadPoolExecutor(3) as callers:  # only one at a time gets the pool
            assert all(torch.equal(y, one) for y in callers.map(lambda _: linear.forward(x, w, 128), range(30)))
    finally:
        build.set_threads(1)


@pytest.mark.slow
def test_zig_builds_the_same_bits(tmp_path, monkeypatch):
    pytest.importorskip("ziglang")
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(20, 70, generator=generator), torch.randn(50, 70, generator=generator)
    expected = linear.forward(x, w, 16)
    monkeypatch.setenv("LOCKSTEP_CXX", f"{sys.executable} -m ziglang c++")
    monkeypatch.setenv("LOCKSTEP_BUILD_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_library", build.load(build.build(build.runnable_builds()[0])))
    assert torch.equal(linear.forward(x, w, 16), expected)

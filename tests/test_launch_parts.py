"""Parts of the launcher: the starter, the private folder, the port, and what the client imports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launch_clone import ROOT, wait_for

from pipeline.errors import UserError
from pipeline.launch import address, processes
from pipeline.launch.ranks import reserve_port


def test_the_starter_named_in_the_environment_counts_only_if_it_is_above_us(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(processes.STARTER_VARIABLE, str(os.getpid()))
    assert processes.starter() == processes.this_process()
    stranger = subprocess.Popen(["sleep", "60"])
    monkeypatch.setenv(processes.STARTER_VARIABLE, str(stranger.pid))
    assert processes.starter().pid != stranger.pid
    found = processes.identify(stranger.pid)
    assert found and found.alive() and not processes.Process(stranger.pid, found.start_time + 1).alive(), "a number that is used again"
    stranger.kill()
    wait_for(lambda: not found.alive(), 2)
    stranger.wait()


def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = address.server_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(UserError, match="is a link"):
        address.server_folder()
    folder.unlink()
    folder.mkdir()
    if os.getuid() == 0:  # only then can the test make it somebody else's
        os.chown(folder, 12345, 12345)
        with pytest.raises(UserError, match="somebody else"):
            address.server_folder()


def test_a_long_folder_name_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert len(str(address.server_folder() / "socket")) < 108


def test_a_reserved_port_can_be_listened_on_and_is_given_to_nobody_else():
    holder, port = reserve_port()
    store = socket.socket()
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    store.bind(("", port))
    store.listen()
    store.close()
    other = socket.socket()
    try:
        other.setsockopt(socket.IPPROTO_IP, 51, (port << 16 | port).to_bytes(4, sys.byteorder))  # IP_LOCAL_PORT_RANGE: only this port
    except OSError:
        pytest.skip("needs Linux 6.3")
    with pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", 0))
    holder.close()
    other.bind(("127.0.0.1", 0))
    assert other.getsockname()[1] == port


def test_the_client_imports_the_standard_library_only():
    code = "import sys, pipeline.launch; print(sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['__main__', 'pipeline']"

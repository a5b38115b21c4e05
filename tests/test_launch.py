"""The launcher: results, failures, and that nothing is left behind. Each test has its own clone, so its own server, without preloads."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_clone import ROOT, Clone, gone, parent_of, wait_for


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


# --- work that succeeds ---------------------------------------------------------------------------------------------------------
def test_rank_zero_gives_the_result_and_later_jobs_find_the_same_server(clone: Clone, tmp_path: Path):
    args = {"text": "ä", "number": 0.1, "large": "x" * 100_000}
    first = clone.run("report", 3, args=args, log_path=str(tmp_path / "logs/train.log"), launch_cfg={"threads": 2})
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout.splitlines()[-1])
    expected = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "LOCAL_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    expected |= {"OMP_NUM_THREADS": "2", "LOCKSTEP_THREADS": "2", "LOCKSTEP_KERNEL_BUILD": "auto", "DS_ACCELERATOR": "cpu"}
    assert {name: result["environment"][name] for name in expected} == expected
    assert {name: result["args"][name] for name in args} == args
    assert result["cwd"] == str(clone.folder)
    assert result["server_threads"] == 1
    assert len(result["fds"]) == 4, "a rank holds its three streams and its pipe, nothing of the server's"
    assert "out of rank 0" in first.stdout and "err of rank 0" in first.stderr and "rank 1" not in first.stdout + first.stderr
    assert (tmp_path / "logs/train.rank00002.log").read_text() == "out of rank 2\nerr of rank 2\n"

    second = clone.result("report", 1, environment={"LOCKSTEP_KERNEL_BUILD": "avx2", "COLUMNS": "77"})
    assert second["server"] == result["server"]
    assert second["seconds"] < 1
    assert (second["environment"]["LOCKSTEP_KERNEL_BUILD"], second["environment"]["COLUMNS"]) == ("avx2", "77")


def test_rank_zero_writes_to_the_terminal_of_the_user(clone: Clone):
    ours, theirs = pty.openpty()
    command = clone.command("report", 1)
    done = subprocess.run(command, cwd=clone.folder, env=clone.environment, stdout=subprocess.PIPE, stderr=theirs, timeout=60)
    assert json.loads(done.stdout.splitlines()[-1])["terminal"] is True
    assert b"err of rank 0" in os.read(ours, 10_000)


def test_clients_that_come_together_share_one_server(clone: Clone):
    server = clone.result("report", launch_cfg={"idle_seconds": 0.1})["server"]
    wait_for(lambda: gone(server), 3)
    (folder,) = clone.folder.parent.glob("run/*/*")
    with open(folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        clients = [clone.start("report", 2) for _ in range(4)]
        time.sleep(0.5)
        assert not (folder / "socket").exists()
    outputs = [client.communicate(timeout=60) for client in clients]
    assert len({json.loads(out.splitlines()[-1])["server"] for out, _ in outputs}) == 1
    assert sum("starting the fork server" in err for _, err in outputs) == 1


def test_a_changed_source_or_variable_replaces_the_server(clone: Clone):
    first = clone.result("report")["server"]
    with open(clone.folder / "pipeline/launch/ranks.py", "a") as stream:
        stream.write("# changed\n")
    second = clone.result("report")["server"]
    third = clone.result("report", environment={"DS_ANYTHING": "1"})["server"]
    assert len({first, second, third}) == 3
    wait_for(lambda: gone(first, second), 3)


def test_a_server_that_is_replaced_finishes_what_it_has(clone: Clone):
    busy = clone.start("misbehave", args={"rank": 0, "how": "wait"})
    ranks = clone.rank_pids()
    server = parent_of(ranks[0])
    assert clone.result("report", environment={"DS_ANYTHING": "1"})["server"] != server
    assert not gone(server) and not gone(ranks[0]) and not gone(ranks[1])
    busy.kill()
    wait_for(lambda: gone(server, *ranks), 3)
    busy.communicate()


def test_an_idle_server_goes_away(clone: Clone):
    server = clone.result("report", launch_cfg={"idle_seconds": 0.2})["server"]
    wait_for(lambda: gone(server), 3)
    assert not list(clone.folder.parent.glob("run/*/*/socket"))


# --- failures ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        ("raise", "exception", "rank 1 of 3 failed: ValueError: no good\nTraceback"),
        ("exit", "exit status 3", "rank 1 of 3 failed: exit status 3"),
        ("kill", "signal SIGKILL", "rank 1 of 3 failed: signal SIGKILL"),
        ("be noticed", "exit status 3", "also rank 0: exception RuntimeError Connection closed by peer"),
        ("result", "exception", "TypeError: Object of type object is not JSON serializable"),
    ],
)
def test_a_rank_that_fails_ends_the_job(clone: Clone, how: str, status: str, text: str):
    client = clone.start("misbehave", 3, args={"rank": 1, "how": how})
    ranks = clone.rank_pids(3)
    start = time.monotonic()
    _, err = client.communicate(timeout=60)
    assert time.monotonic() - start < 2
    assert client.returncode == 1
    assert str((1, status)) in err and text in err and "last words" in err
    assert gone(*ranks)


def test_a_user_error_in_a_rank_is_one_line_with_its_exit_code(clone: Clone):
    done = clone.run("misbehave", args={"rank": 1, "how": "user error"})
    lines = [line for line in done.stderr.splitlines() if "fork server" not in line]
    assert (done.returncode, lines) == (4, ["data.path=x.jsonl is not a file: write it"])


def test_a_job_over_its_time_limit_shows_where_it_stood(clone: Clone):
    client = clone.start("misbehave", args={"rank": 0, "how": "wait"}, launch_cfg={"timeout_seconds": 0.5})
    ranks = clone.rank_pids()
    _, err = client.communicate(timeout=60)
    assert "time limit: not done after launch.timeout_seconds=0.5" in err and "in misbehave" in err
    assert gone(*ranks)


def test_a_function_that_does_not_exist_is_an_import_error_of_the_rank(clone: Clone):
    done = clone.run("absent")
    assert done.returncode == 1 and "AttributeError: module 'launch_jobs' has no attribute 'absent'" in done.stderr


def test_the_cause_is_named_and_not_the_rank_that_noticed(clone: Clone):
    """Rank 0 sees a closed connection when rank 1 dies in the middle of a collective."""
    clone.environment["LOCKSTEP_PRELOAD"] = "torch,torch.distributed"
    result = clone.result("reduce", 3, launch_cfg={"threads": 2})
    assert (result["sum"], result["threads"]) == (6, 2)
    done = clone.run("reduce", 3, args={"dies": 1})
    assert str((1, "exit status 7")) in done.stderr


# --- nothing is left --------------------------------------------------------------------------------------------------------------
def test_no_rank_outlives_its_client(clone: Clone):
    client = clone.start("misbehave", args={"rank": 0, "how": "wait"})
    ranks = clone.rank_pids()
    client.kill()
    wait_for(lambda: gone(*ranks), 2)
    client.communicate()


def test_no_rank_outlives_its_server(clone: Clone):
    client = clone.start("misbehave", args={"rank": 0, "how": "wait"})
    ranks = clone.rank_pids()
    os.kill(parent_of(ranks[0]), signal.SIGKILL)
    _, err = client.communicate(timeout=10)
    assert client.returncode == 1 and "the fork server ended during the job" in err
    wait_for(lambda: gone(*ranks), 2)


@pytest.mark.parametrize("guard", [True, False])
def test_all_end_with_the_dvc_that_started_them(clone: Clone, tmp_path: Path, guard: bool):
    """With a shell in between that lives on, as when DVC runs a stage whose command has several parts."""
    dvc = tmp_path / "dvc"
    dvc.write_text("import subprocess, sys\nsubprocess.run(['sh', '-c', '\"$@\"; true', 'sh', *sys.argv[1:]])\n")
    started = clone.start("misbehave", prefix=(sys.executable, str(dvc)), args={"rank": 0, "how": "wait"}, guard=guard)
    ranks = clone.rank_pids()
    server = parent_of(ranks[0])
    started.kill()
    wait_for(lambda: gone(server, *ranks), 3)
    started.communicate()  # returns when the client and the shell, which share its pipes, have ended


def test_a_server_that_two_have_asked_ends_the_ranks_of_the_one_that_is_killed(clone: Clone, tmp_path: Path):
    dvc = tmp_path / "dvc"
    dvc.write_text("import subprocess, sys\nsubprocess.run(sys.argv[1:])\n")
    other = clone.start("misbehave", prefix=(sys.executable, str(dvc)), args={"rank": 0, "how": "wait"})
    others_ranks = clone.rank_pids()
    for path in clone.pids.iterdir():
        path.unlink()
    started = clone.start("misbehave", prefix=(sys.executable, str(dvc)), args={"rank": 0, "how": "wait"}, guard=False)
    ranks = clone.rank_pids()
    server = parent_of(ranks[0])
    assert parent_of(others_ranks[0]) == server
    client = int(Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text())
    os.kill(client, signal.SIGSTOP)  # it neither ends nor closes its connection
    started.kill()
    wait_for(lambda: gone(*ranks), 3)
    os.kill(client, signal.SIGKILL)
    time.sleep(0.6)  # one look of the server at its starters
    assert not any(gone(pid) for pid in (server, *others_ranks))
    other.kill()
    wait_for(lambda: gone(server, *others_ranks), 3)
    for process in (started, other):
        process.communicate()


def test_a_guarded_process_ends_with_its_parent(tmp_path: Path):
    child = "import time; from pipeline.launch import guard_process; guard_process(); print('ready', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid, flush=True); p.wait()"
    started = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert started.stdout
    pid = next(int(line) for line in (started.stdout.readline(), started.stdout.readline()) if line.strip().isdigit())
    assert not gone(pid)
    started.kill()
    wait_for(lambda: gone(pid), 2)
    started.wait()


# --- with torch and deepspeed loaded, and the other launchers -----------------------------------------------------------------------
@pytest.mark.slow
def test_the_real_preload_starts_no_thread(clone: Clone):
    del clone.environment["LOCKSTEP_PRELOAD"]
    result = clone.result("report")
    assert result["server_threads"] == 1
    assert {"torch", "deepspeed", "safetensors", "omegaconf"} <= set(result["modules"])
    assert not {"mlflow", "pandas"} & set(result["modules"])
    assert clone.result("reduce", 4)["sum"] == 10
    assert clone.result("step", 2)["step_seconds"] < 60, "DeepSpeed compiles nothing at its first start"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_other_launchers_behave_the_same(clone: Clone, launcher: str):
    cfg = {"launcher": launcher}
    assert clone.result("reduce", launch_cfg=cfg)["sum"] == 3
    for how, status, text in [("raise", "exception", "ValueError: no good\nTraceback"), ("kill", "signal SIGKILL", "last words")]:
        done = clone.run("misbehave", args={"rank": 1, "how": how}, launch_cfg=cfg)
        assert done.returncode == 1 and str((1, status)) in done.stderr and text in done.stderr
    assert clone.run("misbehave", args={"rank": 1, "how": "user error"}, launch_cfg=cfg).returncode == 4

    for path in clone.pids.iterdir():
        path.unlink()
    client = clone.start("misbehave", args={"rank": 0, "how": "wait"}, launch_cfg=cfg)
    ranks = clone.rank_pids()
    client.kill()
    wait_for(lambda: gone(*ranks), 5)
    client.communicate()

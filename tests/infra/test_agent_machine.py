"""What the agent does beside jobs: set-up commands, looking at the machine, packing files; on old Pythons too."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from agentnode import AGENT, FOREVER, HANG_GUARD, Node, alive, processes_of, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent runs on Linux only (/proc)")


# -- set-up ----------------------------------------------------------------------------------------------------


def set_up(
    node: Node, *commands: str, inputs: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> Any:
    return node.answer("setup", "--project=p", stdin=wanted(node, *commands, inputs=inputs, env=env or {}))


def wanted(node: Node, *commands: str, job: str = "job-1", **more: Any) -> dict[str, Any]:
    about = {"job": node.id(job), "node": 0, "script": "script.py"}
    return {**about, "commands": commands, "inputs": (), "env": {}, **more}


def test_set_up_runs_once_for_the_same_content_and_again_for_another(node: Node) -> None:
    node.answer("probe", "--project=p", "--private-ip=127.0.0.1")
    (node.project / "requirements.txt").write_text("a")
    commands = ("echo run >> log", 'echo "$MINE" >> log')

    def ran() -> bool:
        return bool(set_up(node, *commands, inputs=("requirements.txt",), env={"MINE": "x y"})["ran"])

    assert [ran(), ran(), ran()] == [True, False, False]
    assert (node.project / "log").read_text() == "run\nx y\n"
    (node.project / "requirements.txt").write_text("b")
    assert [ran(), ran()] == [True, False]
    assert set_up(node, "true")["ran"] is True


def test_moving_content_from_one_input_to_another_is_a_change(node: Node) -> None:
    node.answer("probe", "--project=p", "--private-ip=127.0.0.1")
    for a, b in (("xy", "z"), ("x", "yz")):
        (node.project / "a").write_text(a)
        (node.project / "b").write_text(b)
        assert set_up(node, "true", inputs=("a", "b"))["ran"] is True


def test_a_set_up_command_that_fails_stops_the_rest_shows_its_output_and_runs_again(node: Node) -> None:
    node.answer("probe", "--project=p", "--private-ip=127.0.0.1")
    for _ in range(2):
        answer = set_up(node, "echo fine", "echo out; echo err >&2; exit 3", "touch never")
        assert answer == {
            "ran": True,
            "exit_code": 3,
            "command": "echo out; echo err >&2; exit 3",
            "output": "out\nerr\n",
        }
    assert not (node.project / "never").exists()


def test_reading_the_inputs_of_a_set_up_changes_nothing_in_the_project(node: Node) -> None:
    node.answer("probe", "--project=p", "--private-ip=127.0.0.1")
    (node.project / "real").mkdir()
    (node.project / "real" / "base.txt").write_text("a")
    (node.project / "link").symlink_to("real")
    assert set_up(node, "cat link/base.txt", inputs=("link/base.txt",))["exit_code"] == 0
    assert (node.project / "link").is_symlink()


def begun(node: Node, command: str, mark: str = "began", **more: Any) -> subprocess.Popen[bytes]:
    """A set-up that is at work, as a process: its command has written a file."""
    process = node.popen("setup", "--project=p")
    assert process.stdin is not None
    process.stdin.write(json.dumps(wanted(node, f"touch {mark}; {command}", **more)).encode())
    process.stdin.close()
    until(lambda: (node.project / mark).exists())
    return process


CHILDREN = [
    "sleep 600",
    "trap '' TERM; while :; do sleep 0.1; done",  # does not obey SIGTERM
    "setsid env -i sleep 601 & sleep 600",  # a daemon that has cleaned its environment
]


@pytest.mark.parametrize("command", CHILDREN)
def test_a_cancel_ends_every_process_of_a_set_up_and_the_next_one_begins_at_once(
    node: Node, command: str
) -> None:
    process = begun(node, command)
    assert node.kill(grace=0.5)["left"] == 0
    assert set(processes_of(node.home)) <= {process.pid}  # the step itself, which tells its end
    assert process.stdout is not None
    assert json.loads(process.stdout.read())["cancelled"] is True
    assert process.wait(HANG_GUARD) == 0
    assert set_up_again(node)["ran"] is True


def set_up_again(node: Node) -> Any:
    return node.answer("setup", "--project=p", stdin=wanted(node, "true", job="job-2"))


def test_a_set_up_is_listed_as_a_job_until_it_has_ended(node: Node) -> None:
    process = begun(node, "while [ ! -e go ]; do sleep 0.05; done")
    state = node.state()
    assert (state["state"], state["script"], state["node"]) == ("setup", "script.py", 0)
    assert node.answer("probe", "--project=p", "--private-ip=127.0.0.1")["running"] == [node.id()]
    (node.project / "go").touch()
    assert process.wait(HANG_GUARD) == 0
    assert node.answer("jobs") == []


def test_a_job_that_is_cancelled_between_two_set_up_commands_runs_no_more_of_them(node: Node) -> None:
    folder = node.folder()
    folder.mkdir(parents=True)
    (folder / "cancel").touch()
    answer = set_up(node, "touch never")
    assert answer["cancelled"] is True
    assert not (node.project / "never").exists()


def test_a_set_up_waits_for_that_of_another_launch(node: Node) -> None:
    first = begun(node, "while [ ! -e go ]; do sleep 0.05; done; echo 1 >> order")
    second = node.popen("setup", "--project=p")
    assert second.stdin is not None
    second.stdin.write(json.dumps(wanted(node, "echo 2 >> order", job="job-2")).encode())
    second.stdin.close()
    (node.project / "go").touch()
    assert (first.wait(HANG_GUARD), second.wait(HANG_GUARD)) == (0, 0)
    assert (node.project / "order").read_text() == "1\n2\n"


def test_what_a_set_up_leaves_in_the_background_outlives_the_job(node: Node) -> None:
    """A service that it starts serves the next jobs, too: the set-up runs once."""
    assert set_up(node, "sleep 600 & echo $! > pid")["exit_code"] == 0
    pid = int((node.project / "pid").read_text())
    node.start("print('ran')")
    assert node.follow().state["state"] == "succeeded"
    assert node.kill()["left"] == 0
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)


# -- the machine -----------------------------------------------------------------------------------------------


def loaded() -> Any:
    described = importlib.util.spec_from_file_location("node_agent", AGENT)
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("address", "name"),
    [("127.0.0.1", "lo"), ("127.77.0.4", "lo"), ("192.0.2.1", ""), ("255.255.255.255", "")],
)
def test_the_interface_is_the_one_that_carries_the_address(address: str, name: str) -> None:
    assert loaded().interface_of(address) == name


@pytest.mark.parametrize(("awaited", "seen", "calls"), [(0, 1, 1), (1, 1, 1), (2, 2, 2)])
def test_the_gpus_of_the_type_are_awaited_and_of_a_type_without_any_none(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, awaited: int, seen: int, calls: int
) -> None:
    """The driver shows one more at each call."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 'GPU 0: simulated' >> {tmp_path}/shown\ncat {tmp_path}/shown\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    wanted = [f"--await-gpus={awaited}"] if awaited else []
    assert node.answer("probe", "--project=p", "--private-ip=127.0.0.1", *wanted)["gpus"] == seen
    assert len((tmp_path / "shown").read_text().splitlines()) == calls


def test_a_probe_says_what_a_job_must_know(node: Node) -> None:
    found = node.answer("probe", "--project=p", "--private-ip=127.0.0.1")
    assert found["interface"] == "lo"
    assert found["cpus"] == len(os.sched_getaffinity(0))
    assert 1024 <= found["free_port"] < 65536
    assert os.access(found["python"], os.X_OK)
    assert found["disk_free"] > 0
    assert found["running"] == []
    assert stat.S_IMODE((node.home / ".cloudddp").stat().st_mode) == 0o700
    node.start(FOREVER)
    assert node.answer("probe", "--project=p", "--private-ip=127.0.0.1")["running"] == [node.id()]


@pytest.mark.parametrize("wanted", ["no-such-python", "/no/such/python"])
def test_a_python_that_is_not_there_is_reported_as_none(node: Node, wanted: str) -> None:
    found = node.answer("probe", "--project=p", "--private-ip=127.0.0.1", "--python", wanted)
    assert found["python"] == ""


def test_a_python_that_was_named_is_the_one_reported(node: Node) -> None:
    found = node.answer("probe", "--project=p", "--private-ip=127.0.0.1", "--python", sys.executable)
    assert found["python"] == sys.executable


def test_packing_gives_the_files_that_exist_and_skips_those_that_do_not(node: Node) -> None:
    (node.project / "runs" / "1").mkdir(parents=True)
    (node.project / "runs" / "1" / "m.pt").write_bytes(b"\x00weights")
    (node.project / "runs" / "latest").symlink_to("1")
    done = node.call("pack", "--project=p", "runs", "absent")
    assert done.returncode == 0
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        assert sorted(archive.getnames()) == ["runs", "runs/1", "runs/1/m.pt", "runs/latest"]
        member = archive.extractfile("runs/1/m.pt")
        assert member is not None
        assert member.read() == b"\x00weights"


# -- the oldest Python -----------------------------------------------------------------------------------------


def oldest_python() -> str:
    """A Python 3.9 that runs, or ''; a version manager may put a name on PATH that does not."""
    found = shutil.which("python3.9") or ""
    if not found:
        return ""
    done = subprocess.run(
        [found, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, check=False
    )
    return found if done.stdout.strip() == b"(3, 9)" else ""


@pytest.mark.skipif(not oldest_python(), reason="no Python 3.9 on PATH")
def test_the_agent_does_its_work_on_python_3_9(tmp_path: Path) -> None:
    node = Node(tmp_path / "home", python=oldest_python())
    assert node.answer("probe", "--project=p", "--private-ip=127.0.0.1")["interface"] == "lo"
    assert set_up(node, "touch made")["ran"] is True
    node.start("print('hello')", "raise SystemExit(7)")
    found = node.follow()
    assert (found.state["state"], found.state["exit_code"]) == ("failed", 7)
    assert b"hello\n" in (found.logs.get(0, b"hello\n"))
    node.start(FOREVER, job="job-2")
    node.rank_pid(job="job-2")
    assert node.kill("job-2", "--cancel")["state"] == "cancelled"
    assert node.call("pack", "--project=p", "made").returncode == 0
    until(lambda: not processes_of(node.home))

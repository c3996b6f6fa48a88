"""The lab of an ordinary user, in a user namespace: the same nodes and commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import until

from cloudddp.sim.hosts import lab_namespaces

ROOT = Path(__file__).parents[2]
# A different user for each test process: two at a time would see each other's processes.
ORDINARY_USER = 10_000_000 + os.getpid()


def interpreter() -> str:
    """Return a Python of this version that another user may run, or ''."""
    for candidate in (sys.executable, f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"):
        try:
            subprocess.run(
                [candidate, "-S", "-c", ""],
                user=ORDINARY_USER,
                group=ORDINARY_USER,
                extra_groups=[],
                cwd="/",
                capture_output=True,
                check=True,
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    return ""


class Person:
    """An ordinary user with a folder and cloudddp."""

    def __init__(self, home: Path, python: str) -> None:
        self.home = home
        self.project = home / "project"
        self.project.mkdir()
        os.chown(self.project, ORDINARY_USER, ORDINARY_USER)
        self.python = python
        path = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
        self._environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(home),
            "CLOUDDDP_HOME": str(home / "state"),
            "PYTHONPATH": path,
            "CLOUDDDP_CLUSTER": "mine",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def __call__(self, *words: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self.python, "-m", "cloudddp", *words],
            user=ORDINARY_USER,
            group=ORDINARY_USER,
            extra_groups=[],
            cwd=self.project,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert not ok or done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
        return done

    def processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    lines = (entry / "status").read_text()
                except OSError:
                    continue
                alive = "\nState:\tZ" not in lines and "\nState:\tX" not in lines
                if alive and f"\nUid:\t{ORDINARY_USER}\t" in lines:
                    found.append(int(entry.name))
        return found


@pytest.fixture
def person() -> Iterator[Person]:
    if os.getuid():
        pytest.skip("needs root to become another user")
    python = interpreter()
    if not python:
        pytest.skip("no Python of this version that another user may run")
    # In a process of that user: root and an ordinary user may have different restrictions.
    checked = subprocess.run(
        [
            python,
            "-c",
            "from cloudddp.sim.hosts import lab_namespaces as lab; print(lab.unavailable_reason())",
        ],
        user=ORDINARY_USER,
        group=ORDINARY_USER,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        env={
            "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]),
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        },
    )
    if checked.returncode or checked.stdout.strip():
        pytest.skip(f"no namespaces for an ordinary user: {checked.stdout.strip() or checked.stderr[-300:]}")
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, ORDINARY_USER, ORDINARY_USER)
        found = Person(Path(folder), python)
        yield found
        found("sim", "stop")
        until(lambda: not found.processes())  # killed processes take a moment to disappear


def test_ordinary_user_runs_a_whole_job(person: Person) -> None:
    (person.project / "hi.py").write_text("import socket; print('hi from', socket.gethostname())")
    (person.project / "cloudddp.toml").write_text('[job]\nrendezvous = "direct"\nnproc_per_node = 1\n')
    assert "separate hosts" in person("sim", "start", "--nodes", "namespace").stdout
    person("--sim", "up", "-n", "2", "-t", "g5.12xlarge")
    output = person("--sim", "launch", "hi.py").stdout
    assert "hi from ip-172-31-" in output
    shown = person(
        "--sim", "exec", "--", "id -un; sudo id -u; cat /proc/1/comm; ip -o -4 addr show dev ens5"
    ).stdout
    assert shown.count("ubuntu") >= 2
    assert shown.count("init") == 2
    assert shown.count("/20") == 2
    for command in ("unshare -U true", "sudo unshare -U true", "sudo unshare -m true"):
        assert person("--sim", "ssh", "0", "--", command, ok=False).returncode != 0, command
    confined = "grep -c '^Seccomp:.2' /proc/1/status; sudo grep -c '^Seccomp:.2' /proc/self/status"
    assert person("--sim", "ssh", "0", "--", confined).stdout.split() == ["1", "1"]
    assert person("--sim", "ssh", "0", "--", "sudo cat /proc/keys /proc/timer_list").stdout == ""
    assert person("--sim", "ssh", "0", "--", "hostname").stdout.startswith("ip-172-31-")
    listener = "pgrep -f '^sshd: .*listener'"
    restarted = f"{listener}; sudo systemctl restart ssh; until {listener}; do sleep 0.05; done"
    before, after = person("--sim", "ssh", "0", "--", restarted).stdout.split()
    assert before != after
    assert person("--sim", "ssh", "0", "--", "id -un").stdout == "ubuntu\n"
    person("--sim", "down")
    assert json.loads(person("sim", "status", "--json").stdout)["nodes"] == []


def test_ordinary_user_reaches_private_nodes_by_a_session(person: Person) -> None:
    person("sim", "start", "--nodes", "namespace")
    session = f"{person.python} -m cloudddp sim session --target %h --port %p"
    person("--sim", "up", "-n", "1", "-t", "g5.12xlarge", "--proxy-command", session)
    assert "here" in person("--sim", "exec", "--", "echo here").stdout
    assert person("--sim", "ssh", "0", "--", "id -un").stdout == "ubuntu\n"
    person("--sim", "down")


def test_stop_after_the_server_of_an_ordinary_user_was_killed(person: Person) -> None:
    person("sim", "start", "--nodes", "namespace")
    person("--sim", "up", "-n", "2", "-t", "g5.12xlarge")
    os.kill(json.loads(person("sim", "status", "--json").stdout)["pid"], signal.SIGKILL)
    assert "processes ended" in person("sim", "stop").stdout
    until(lambda: not person.processes())


def test_unavailable_reason_does_not_change_the_process() -> None:
    before = {name: Path(f"/proc/self/ns/{name}").readlink() for name in ("net", "mnt", "user", "pid")}
    lab_namespaces.unavailable_reason()
    assert {name: Path(f"/proc/self/ns/{name}").readlink() for name in before} == before

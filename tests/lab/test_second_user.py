"""Users of the computer without privileges: one can start a simulator with namespace nodes, and another one
can neither reach, read nor stop it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import stranger
from support.harness import ROOT, cannot, until

from cloudddp.simulator.guest import on_node
from cloudddp.simulator.hosts import lab_namespaces
from cloudddp.simulator.linux import processes

OWNER, OTHER = 54321, 54322  # uids that no computer assigns
SCRIPT = Path(stranger.__file__)
PYTHONS = (sys.executable, f"/usr/bin/python3.{sys.version_info[1]}")
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def python_of(user: int, *candidates: str) -> str:
    """Return the first interpreter that this user may run."""
    for candidate in candidates:
        try:
            subprocess.run([candidate, "-S", "-c", ""], cwd="/", capture_output=True, check=True, **_as(user))
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    return cannot(f"no Python that user {user} may run among {', '.join(candidates)}")


def _as(user: int) -> dict[str, Any]:
    return {"user": user, "group": user, "extra_groups": []}


@dataclass
class Owner:
    """The user who has started a simulator with one node and a process on it."""

    uid: int
    nodes: str
    folder: Path
    python: str
    umask: int = 0

    @property
    def home(self) -> Path:
        return self.folder / "state"

    @property
    def project(self) -> Path:
        return self.folder / "project"

    def __call__(self, *words: str) -> str:
        done = self.run(*words)
        assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": SYSTEM_PATH,
            "HOME": str(self.folder),
            "CLOUDDDP_HOME": str(self.home),
            "CLOUDDDP_CLUSTER": "mine",
            "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return subprocess.run(
            [self.python, "-m", "cloudddp", *words],
            cwd=self.project,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            umask=self.umask,
            **_as(self.uid),
        )

    def start(self) -> None:
        self("sim", "start", "--nodes", self.nodes)
        self("--sim", "up", "-n", "1", "-t", "g5.xlarge")
        self("--sim", "exec", "--", "nohup sleep 4321 > /dev/null 2>&1 < /dev/null & echo begun")

    def ssh(self, command: str) -> str:
        return self("--sim", "ssh", "0", "--", command)

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self("sim", "status", "--json")))

    def pids(self) -> list[int]:
        return [process.pid for process in processes.belonging(self.home)]

    def exposed(self, network: int) -> dict[str, Any]:
        """Return the targets for the other user. `network` is the pid of a process in the other user's
        network."""
        pids = self.pids()
        return {
            "endpoint": int(self.status()["endpoint"].rpartition(":")[2]),
            "tcp": listening(pids, network),
            "patience": 60,
            "unix": unix_sockets(pids, network),
            "paths": [str(path) for path in (self.home, *self.home.rglob("*"))],
            "pids": pids,
        }


def sockets(pids: list[int]) -> set[str]:
    """Return the inodes of the processes' sockets."""
    found = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(descriptor)  # noqa: PTH115  not a path
            except OSError:
                continue
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def listening(pids: list[int], network: int) -> list[tuple[str, int]]:
    ours, found = sockets(pids), []
    for line in Path(f"/proc/{network}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in ours:
            address, port = words[1].split(":")
            octets = bytes.fromhex(address)[::-1]
            found.append((".".join(map(str, octets)), int(port, 16)))
    return found


def unix_sockets(pids: list[int], network: int) -> list[str]:
    ours = sockets(pids)
    lines = [line.split() for line in Path(f"/proc/{network}/net/unix").read_text().splitlines()[1:]]
    return [words[7] for words in lines if words[6] in ours and len(words) > 7]


def attempt(user: int, wanted: dict[str, Any]) -> list[str]:
    """Return what the other user succeeds in."""
    # Not from the tests' folder, which another user may be unable to read.
    python = python_of(user, "/usr/bin/python3", sys.executable)
    done = subprocess.run(
        [python, "-I", "-c", SCRIPT.read_text()],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
        env={"PATH": SYSTEM_PATH},
        **_as(user),
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@contextlib.contextmanager
def owner_of(uid: int, nodes: str, umask: int = 0) -> Iterator[Owner]:
    """A user with an empty folder, which others may read; the simulator there is stopped afterwards."""
    if os.getuid():
        cannot("needs root to become another user")
    python = python_of(uid, *PYTHONS)
    if nodes == "namespace" and (why := unavailable_reason(uid, python)):
        cannot(f"no namespaces for user {uid}: {why}")
    with tempfile.TemporaryDirectory() as folder:
        found = Owner(uid, nodes, Path(folder), python, umask)
        found.project.mkdir()
        for path in (found.folder, found.project):
            os.chown(path, uid, uid)
        found.folder.chmod(0o755)
        try:
            yield found
        finally:
            found("sim", "stop")


@pytest.fixture(
    scope="module", params=[(0, "process"), (OWNER, "namespace")], ids=["root-process", "user-namespace"]
)
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    with owner_of(*request.param) as found:
        found.start()
        yield found


def unavailable_reason(uid: int, python: str) -> str:
    if not uid:
        return lab_namespaces.unavailable_reason()
    checked = subprocess.run(
        [
            python,
            "-c",
            "from cloudddp.simulator.hosts import lab_namespaces as lab; print(lab.unavailable_reason())",
        ],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        **_as(uid),
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]), "PATH": SYSTEM_PATH},
    )
    return checked.stdout.strip() or checked.stderr[-300:]


def lasting(status: dict[str, Any]) -> dict[str, Any]:
    """Return what `sim status` prints without the processes of the nodes: some of the boot's end by
    themselves."""
    nodes = [{key: value for key, value in node.items() if key != "processes"} for node in status["nodes"]]
    return {**status, "nodes": nodes}


def test_other_users_have_no_access(owner: Owner) -> None:
    wanted = owner.exposed(os.getpid())
    assert wanted["tcp"]
    assert len(wanted["paths"]) > 5
    assert len(wanted["pids"]) > 1
    before = lasting(owner.status())
    assert attempt(OTHER, wanted) == []
    assert lasting(owner.status()) == before


def test_owner_has_access(owner: Owner) -> None:
    """So that the test above can fail."""
    wanted = owner.exposed(os.getpid())
    wanted["endpoint"] = 0  # without the requests, which would end it
    wanted["patience"] = 5  # a connection that is accepted stays open
    achieved = " ".join(attempt(owner.uid, wanted))
    server = owner.status()["pid"]
    for needed in (
        "answers b",
        "can be read",
        "can be written",
        "can be planted",
        f"{server}: environ can be",
    ):
        assert needed in achieved, needed


def test_node_uids_belong_to_no_user(owner: Owner) -> None:
    """A user can trace processes with the same uid, also in other namespaces."""
    for uid in (100, 1000, 65534):
        wanted = {**owner.exposed(os.getpid()), "endpoint": 0, "tcp": [], "paths": []}
        assert attempt(uid, wanted) == []
    assert on_node.USER_ID >= 1879048192  # systemd.io/UIDS-GIDS: never assigned


def test_nodes_are_unreachable_from_outside_the_lab(owner: Owner) -> None:
    listeners = [address for address, _ in listening(owner.pids(), os.getpid())]
    assert {address.partition(".")[0] for address in listeners} == {"127"}
    (node,) = owner.status()["nodes"]
    shown = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    for address in (node["private_ip"], node["public_ip"]) if owner.nodes == "namespace" else ():
        assert address not in shown
        way = subprocess.run(
            ["ip", "-4", "route", "get", address], capture_output=True, text=True, check=False
        )
        assert way.returncode != 0 or "via" in way.stdout  # no route, or one away from this computer


def test_simulator_of_another_user_is_not_used() -> None:
    """In a folder that both users can write, one could make the other run commands."""
    with owner_of(OWNER, "process") as other:
        other.folder.chmod(0o777)
        other("sim", "start", "--nodes", "process")
        other.home.chmod(0o777)
        try:
            mine = Owner(0, "process", other.folder, sys.executable)
            for words in (("sim", "status"), ("sim", "start"), ("--sim", "up", "-n", "1", "-t", "g5.xlarge")):
                done = mine.run(*words)
                assert done.returncode in (1, 2), words
                assert "belongs to another user" in done.stderr or "is not running" in done.stderr
        finally:
            other.home.chmod(0o700)


def test_ordinary_user_runs_a_whole_job_by_sessions_and_stops_what_was_killed() -> None:
    """In a user namespace: the same nodes and commands."""
    with owner_of(OWNER, "namespace", umask=0o022) as owner:
        (owner.project / "hi.py").write_text("import socket; print('hi from', socket.gethostname())")
        (owner.project / "cloudddp.toml").write_text('[job]\nrendezvous = "direct"\nnproc_per_node = 1\n')
        assert "separate hosts" in owner("sim", "start", "--nodes", "namespace")
        session = f"{owner.python} -m cloudddp sim session --target %h --port %p"
        owner("--sim", "up", "-n", "2", "-t", "g5.12xlarge", "--proxy-command", session)
        assert "hi from ip-172-31-" in owner("--sim", "launch", "hi.py")
        shown = owner(
            "--sim", "exec", "--", "id -un; sudo id -u; cat /proc/1/comm; ip -o -4 addr show dev ens5"
        )
        assert shown.count("ubuntu") >= 2
        assert shown.count("init") == 2
        assert shown.count("/20") == 2
        for command in ("unshare -U true", "sudo unshare -U true", "sudo unshare -m true"):
            assert owner.run("--sim", "ssh", "0", "--", command).returncode != 0, command
        confined = "grep -c '^Seccomp:.2' /proc/1/status; sudo grep -c '^Seccomp:.2' /proc/self/status"
        assert owner.ssh(confined).split() == ["1", "1"]
        assert owner.ssh("sudo cat /proc/keys /proc/timer_list") == ""
        listener = "pgrep -f '^sshd: .*listener'"
        restarted = f"{listener}; sudo systemctl restart ssh; until {listener}; do sleep 0.05; done"
        before, after = owner.ssh(restarted).split()
        assert before != after
        assert owner.ssh("id -un") == "ubuntu\n"
        owner("--sim", "down")
        assert owner.status()["nodes"] == []
        owner("--sim", "up", "-n", "1", "-t", "g5.12xlarge")
        os.kill(owner.status()["pid"], signal.SIGKILL)
        assert "processes ended" in owner("sim", "stop")
        until(lambda: not owner.pids())

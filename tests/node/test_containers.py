"""Ranks and setup commands in a container: what it sees, its signals and exit codes, and that none is left.

The `docker` is a strict one (support/jail.py); as root, a container sees nothing of this computer but its
mounts and programs.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support import jail
from support.agentnode import FOREVER, SAVES, Node, alive, gang_of, until

from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Container, Process, SetupReply

IMAGE = "train:1"


def with_docker(node: Node, tmp_path: Path, *, jailed: bool) -> Node:
    folder = jail.install(tmp_path / "bin", jailed=jailed)
    (tmp_path / "tmp").mkdir()
    paths = (str(folder), str(Path(sys.executable).parent), os.environ["PATH"])
    node.agent = Path(shutil.copytree(node.agent, node.store / "agent-1"))  # where `ship` puts it
    node.variables |= {"PATH": os.pathsep.join(paths), "TMPDIR": str(tmp_path / "tmp")}
    return node


@pytest.fixture
def docker(node: Node, tmp_path: Path) -> Node:
    """A node with Docker."""
    return with_docker(node, tmp_path, jailed=os.getuid() == 0)


@pytest.fixture
def plain(node: Node, tmp_path: Path) -> Node:
    """A node with a Docker whose containers see all files."""
    return with_docker(node, tmp_path, jailed=False)


def set_up(node: Node, *commands: str, image: str = IMAGE, torch: bool = False, **more: Any) -> SetupReply:
    return node.set_up(*commands, container=Container(image, torch=torch), **more)


def start(node: Node, *scripts: str, image: str = IMAGE, **more: Any) -> None:
    """Start ranks in an image that is set up."""
    found = set_up(node, image=image)
    assert found.exit_code == 0, found
    processes = [
        Process((), ("python3", node.script(code)), {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, code in enumerate(scripts)
    ]
    node.start(processes=processes, container=Container(found.image), **more)


def calls(node: Node, verb: str) -> list[list[str]]:
    lines = (node.home / ".simulated-docker").read_text().splitlines()
    return [words for words in map(json.loads, lines) if words[0] == verb]


def test_rank_sees_its_variables_and_the_mounts_and_nothing_else(docker: Node) -> None:
    outside = docker.home.parent / "outside"
    outside.write_text("not mounted")
    (docker.project / "code.txt").write_text("mounted")
    code = f"""
import json, os, pathlib
home = pathlib.Path.home()
pathlib.Path("written").write_text("by the rank")
print(json.dumps({{
    "env": dict(os.environ), "cwd": os.getcwd(),
    "outside": os.path.exists({str(outside)!r}), "code": open("code.txt").read(),
}}))
"""
    docker.variables["OF_THE_NODE"] = "secret"
    start(
        docker, code, env={"TOKEN": "a b\n'c'"}, paths={"CLOUDDDP_DATA_X": "x"}, gang=gang_of(preflight=True)
    )
    followed = docker.follow()
    assert followed.state.phase is JobPhase.SUCCEEDED, followed.logs
    seen = json.loads(followed.logs[0])
    assert seen["env"]["TOKEN"] == "a b\n'c'"
    assert seen["env"]["CLOUDDDP_DATA_X"] == f"{docker.project}/x"
    assert seen["env"]["HOME"] == str(docker.home)
    assert "OF_THE_NODE" not in seen["env"]
    assert (seen["cwd"], seen["code"]) == (str(docker.project), "mounted")
    assert (docker.project / "written").read_text() == "by the rank"
    if os.getuid() == 0:
        assert not seen["outside"]
    (words,) = (one for one in calls(docker, "run") if "--env=RANK" in one)
    recorded = json.loads((docker.folder() / "facts.json").read_text())
    assert recorded["python"] == platform.python_version(), "of the image"
    text = " ".join(words)
    assert "a b" not in text, "values of variables are not in argv"
    assert "--env=TOKEN" in words
    for option in (
        "--pid=host",
        "--security-opt=no-new-privileges",  # `sudo` of the image would leave files of root in the project
        f"--user={os.getuid()}:{os.getgid()}",
        "--network=host",
        "--ipc=host",
        "--ulimit=memlock=-1",
        "--rm",
        "--pull=never",
    ):
        assert option in words
    assert "--gpus=all" not in words


def test_rank_gets_sigterm_once_and_no_container_is_left(docker: Node) -> None:
    start(docker, SAVES)
    until(lambda: (docker.project / "ready").exists())
    assert docker.cancel().left == 0
    assert (docker.project / "saved").read_text() == "x"
    assert docker.ended().phase is JobPhase.CANCELLED
    assert list((docker.home / ".simulated-containers").iterdir()) == []


def container_pid(node: Node) -> int:
    folder = node.home / ".simulated-containers"
    return int(until(lambda: next((text for one in folder.iterdir() if (text := one.read_text())), "")))


def test_containers_of_a_client_that_was_killed_are_ended(docker: Node) -> None:
    """Docker's client, and then the whole agent, may die while containers live."""
    start(docker, FOREVER, FOREVER)
    docker.rank_pid(0)
    docker.rank_pid(1)
    inside = container_pid(docker)
    client = int(Path(f"/proc/{inside}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(client, signal.SIGKILL)
    assert docker.ended().phase is JobPhase.FAILED
    until(lambda: not alive(inside))
    assert list((docker.home / ".simulated-containers").iterdir()) == []


def test_ranks_in_containers_end_without_their_agent(docker: Node) -> None:
    start(docker, FOREVER, grace=1.0)
    pid, supervisor = docker.rank_pid(0), docker.supervisor_pid()
    guard = int(Path(f"/proc/{supervisor}/stat").read_text().rsplit(")", 1)[1].split()[1])
    for one in (guard, supervisor):
        os.kill(one, signal.SIGKILL)
    until(lambda: not alive(pid))
    assert docker.cancel().left == 0


def test_setup_runs_in_the_container_once_for_each_image(docker: Node) -> None:
    install = "mkdir -p $PYTHONUSERBASE && echo x >> $PYTHONUSERBASE/installed"
    for _ in range(2):
        reply = set_up(docker, install, 'echo "$A" >> log', env={"A": "b"})
        assert reply.exit_code == 0
        assert reply.image.startswith("sha256:")
    assert (docker.project / "log").read_text() == "b\n"
    assert len(calls(docker, "pull")) == 1
    start(docker, "import os; print(open(os.environ['PYTHONUSERBASE'] + '/installed').read())")
    assert docker.follow().logs[0] == b"x\n\n"
    later = set_up(docker, f"! ls $PYTHONUSERBASE && {install}", image="other:2", job="job-2")
    assert later.exit_code == 0
    assert len(calls(docker, "pull")) == 2


def test_image_that_cannot_be_used_is_named(plain: Node) -> None:
    reply = set_up(plain, image="no-such-image:1", torch=False)
    assert (reply.exit_code, bool(reply.image)) == (1, True)
    assert "repository does not exist" in reply.output
    assert set_up(plain, image="train:1", torch=False).exit_code == 0


def test_missing_docker_and_python_are_named(plain: Node, tmp_path: Path) -> None:
    reply = set_up(plain, python="no-python")
    assert (reply.exit_code, bool(reply.image)) == (127, True)
    assert "executable file not found" in reply.output
    bare = tmp_path / "programs"
    bare.mkdir()
    (bare / "bash").symlink_to("/bin/bash")
    plain.variables["PATH"] = str(bare)
    reply = set_up(plain)
    assert (reply.exit_code, bool(reply.image)) == (127, True)
    assert "docker: not found" in reply.output.replace("command not found", "not found")

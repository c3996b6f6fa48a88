"""Steps of the agent over one channel of a real SSH connection: one process on the node serves them, whatever
it does."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import programs
from support.agentnode import until
from support.sshserver import Server, Site

from cloudddp.agent import client, program
from cloudddp.agent.protocol import ExitCode, codec
from cloudddp.agent.protocol.codec import encode
from cloudddp.agent.protocol.frames import FollowRequest
from cloudddp.agent.protocol.jobs import JobsReply, JobsRequest
from cloudddp.agent.protocol.machine import ProbeRequest
from cloudddp.agent.replies import RefusedByAgent
from cloudddp.errors import NodeError
from cloudddp.ssh.fleet import Fleet
from cloudddp.ssh.running import CommandSpec


class Node:
    """A node behind a real SSH server."""

    def __init__(self, fleet: Fleet, server: Server, home: Path) -> None:
        self.fleet, self.server, self.home = fleet, server, home

    def jobs(self, **more: Any) -> JobsReply:
        return self.call(JobsRequest(), **more)

    def call(self, request: Any, **more: Any) -> Any:
        return client.call(self.fleet, 0, request, **more)

    @property
    def commands(self) -> int:
        """How many commands were started there so far."""
        return len(self.server._all)

    def replace_python(self, text: str) -> None:
        """Put a program in place of the node's python3."""
        programs.program(self.home / "bin" / "python3", text)


@pytest.fixture
def node(ssh_site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))  # of the commands of the SSH server
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    server = ssh_site.server()
    with Fleet({0: ssh_site.target(server.port)}) as fleet:
        fleet.connect()
        found = Node(fleet, server, home)
        fleet.run(0, CommandSpec(program.ship(), program.compressed_agent()))
        yield found


def test_one_command_serves_the_steps_of_a_connection(node: Node) -> None:
    """A body that has nothing to send at first does not end it; input that a step has not read does, which
    would be taken for the next request."""
    before = node.commands
    assert client.run_step(node.fleet, 0, JobsRequest(), body=lambda: [b""] * 5).exit_code == 0
    for _ in range(5):
        assert node.jobs() == JobsReply(())
    assert node.commands == before + 1
    with pytest.raises(RefusedByAgent):
        node.call(NO_SUCH_JOB)
    assert node.jobs() == JobsReply(())
    assert node.commands == before + 2, "what a step that failed has left of its input is unknown"
    body = [b"x" * 100_000] * 50
    assert client.run_step(node.fleet, 0, JobsRequest(), body=lambda: body).exit_code == 0
    assert node.jobs() == JobsReply(())
    assert node.commands == before + 3
    served = [child.pid for child in node.server._all if child.returncode is None]
    assert len(served) == 1
    node.fleet.close()
    until(lambda: all(child.returncode is not None for child in node.server._all))


def test_broken_connection_ends_the_step_and_a_new_one_serves_again(node: Node) -> None:
    assert node.jobs() == JobsReply(())
    node.server.drop()
    with pytest.raises(NodeError):
        node.jobs()
    node.fleet.reconnect(0)
    assert node.jobs() == JobsReply(())

    # An agent that is missing is sent, and the step done.
    node.fleet.reconnect(0)
    shutil.rmtree(node.home / program.agent_path())
    before = node.commands
    assert node.jobs() == JobsReply(())
    assert node.commands == before + 3


NO_SUCH_JOB: Any = FollowRequest("20260101-000000-0000", wait=False, heartbeat=5.0)


# What a program in place of the agent writes after it has read a request.
REFUSED = {
    "no end": ("printf '{\"jobs\": []}\\n'; sleep 600", "did not end within 2 s"),
    "no exit code": ("printf '{}\\n\\000x\\n'; printf '\\000' >&2; sleep 600", "cannot read"),
    "an exit code that is too long": ("printf '\\000%01000d' 0; sleep 600", "cannot read"),
    "an end without an answer": ("printf '\\000\\000' >&2; printf '\\000%s\\n' 0; sleep 600", "cannot read"),
    "an answer without an end": ("exec cat /dev/zero | tr '\\0' 'x'", "longer than"),
    "its own end": ("exit 3", "exit code 3"),
    "a success without an answer": ("exit 0", "ended without an answer"),
}


def test_output_of_another_program_is_an_error_that_names_the_node(node: Node) -> None:
    for writes, message in REFUSED.values():
        node.replace_python(f"#!/bin/sh\nhead -c 12 > /dev/null\n{writes}\n")
        with pytest.raises(NodeError, match=message) as caught:
            node.jobs(timeout=2.0)
        assert "node 0" in str(caught.value)
        (node.home / "bin" / "python3").unlink()
        assert node.jobs() == JobsReply(())
        node.fleet.reconnect(0)  # ends the agent that serves it


def test_output_while_no_step_runs_is_not_taken_for_an_answer(node: Node) -> None:
    answer = r"""printf '{"jobs": []}\n\000%s\n' 0; printf '\000' >&2"""
    node.replace_python(
        f"#!/bin/sh\nhead -c 12 > /dev/null\n{answer}\nsleep 0.2\ntouch ~/written\n{answer}\nsleep 600\n"
    )
    assert node.jobs() == JobsReply(())
    until((node.home / "written").exists)
    (node.home / "bin" / "python3").unlink()
    time.sleep(0.5)  # it arrives
    before = node.commands
    assert node.jobs() == JobsReply(())
    assert node.commands == before + 1


def test_invalid_request_and_a_step_that_fails_end_the_process(node: Node) -> None:
    """The rest of its input could hold a request that the laptop never made."""
    command = f"{sys.executable} -IS {node.home}/{program.agent_path()} serve"
    for data in (b"\xff" * 9, b"\0" * 9, b"\0\0\0\1\0\0\0\1\0j"):
        end = node.fleet.run(0, CommandSpec(command, data))
        assert (end.exit_code, end.stderr) == (1, b"not a step of this agent\n")
    data = codec.ask("follow", encode(NO_SUCH_JOB)) + codec.ask("jobs", b"{}")
    end = node.fleet.run(0, CommandSpec(command, data))
    assert (end.exit_code, end.stdout) == (ExitCode.NO_JOB, codec.stdout_end(end.exit_code))


def test_each_step_has_its_own_time_limit(node: Node) -> None:
    """That of the last step does not count: a user may watch a job between two steps for hours."""
    assert node.jobs() == JobsReply(())
    assert node.jobs(timeout=2.0) == JobsReply(())  # this one needs no new interpreter
    before = node.commands
    time.sleep(2.5)
    assert node.jobs(timeout=300.0) == JobsReply(())
    assert node.commands == before
    (child,) = [child for child in node.server._all if child.returncode is None]
    os.kill(child.pid, signal.SIGSTOP)
    try:
        with pytest.raises(NodeError, match="did not end within 1 s"):
            node.jobs(timeout=1.0)
    finally:
        os.kill(child.pid, signal.SIGCONT)


def test_end_in_pieces_is_understood(node: Node) -> None:
    node.replace_python(
        "#!/bin/sh\nhead -c 15 > /dev/null\nprintf '\\000' >&2; sleep 0.1\n"
        "printf '{\"jobs\": []}\\n\\000'; sleep 0.1; printf 0; sleep 0.1; printf '\\n'; sleep 600\n"
    )
    assert node.jobs() == JobsReply(())


def test_program_that_a_step_starts_does_not_get_what_follows_on_stdin(node: Node) -> None:
    programs.program(node.home / "bin" / "nvidia-smi", "cat > ~/stolen")
    for _ in range(2):
        assert node.call(ProbeRequest(project="project", private_ip="127.0.0.1")).gpus == 0
    assert (node.home / "stolen").read_bytes() == b""

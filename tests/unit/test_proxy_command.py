"""SSH connections by a proxy command: the program's stream, its end, and its errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.harness import wait_for
from support.sshserver import Site, refusal

from cloudddp.config.checks import connection, expand_proxy_command
from cloudddp.config.cluster_spec import ClusterSpec, connection_mode
from cloudddp.errors import ConnectError
from cloudddp.ssh.connection import Connection
from cloudddp.ssh.routes.command import ProxyCommand
from cloudddp.ssh.running import CommandSpec
from cloudddp.ssh.target import Target

NC = (
    "import os, socket, sys, threading\n"
    "open(sys.argv[2], 'a').write(f'{os.getpid()}\\n')\n"
    "print('x' * 200_000, file=sys.stderr)\n"  # more than a pipe holds
    "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
    "def out():\n"
    "    while data := s.recv(65536): os.write(1, data)\n"
    "    os._exit(0)\n"
    "threading.Thread(target=out, daemon=True).start()\n"
    "while data := os.read(0, 65536): s.sendall(data)\n"
)


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "nc.py"
    path.write_text(NC)
    return f"{sys.executable} {path}"


def by(site: Site, command: str, port: int = 1) -> Target:
    return site.target(port, route=ProxyCommand(command, {"AWS_REGION": "eu-west-1"}))


def test_command_carries_the_connection_and_ends_with_it(
    ssh_site: Site, program: str, tmp_path: Path
) -> None:
    connection = Connection.open(by(ssh_site, f"{program} {ssh_site.server().port} {tmp_path / 'pids'}"))
    data = bytes(range(256)) * (1 << 13)
    assert connection.run(CommandSpec("cat", stdin=data, limit=1 << 24)).stdout == data
    (pid,) = map(int, (tmp_path / "pids").read_text().split())
    connection.close()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the command has ended")


def test_refused_host_key_ends_the_command(ssh_site: Site, program: str, tmp_path: Path) -> None:
    other = ssh_site.server(algorithm="ecdsa-sha2-nistp256")
    error = refusal(by(ssh_site, f"{program} {other.port} {tmp_path / 'pids'}"))
    assert "refused" in error.message
    pid = (tmp_path / "pids").read_text().strip()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the command has ended")


def test_command_gets_the_region_and_changes_no_environment(ssh_site: Site, tmp_path: Path) -> None:
    before = dict(os.environ)
    refusal(by(ssh_site, f"sh -c 'echo $AWS_REGION > {tmp_path}/region'"))
    assert ((tmp_path / "region").read_text(), dict(os.environ)) == ("eu-west-1\n", before)


def test_bash_reads_no_start_file(ssh_site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would where its stdin is a socket and no other shell has started it: under cron, in CI."""
    (tmp_path / ".bashrc").write_text(f"touch {tmp_path}/was-read\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    monkeypatch.delenv("SHLVL", raising=False)
    refusal(by(ssh_site, "bash -c 'exit 3'"))
    assert not (tmp_path / "was-read").exists()


@pytest.mark.parametrize(
    ("command", "message", "retry"),
    [
        ("sh -c 'echo one >&2; echo two >&2; exit 3'", "the proxy command exited with 3: two", True),
        ("no-such-program-here", "exited with 127", False),
        ("sh -c 'echo An error occurred: AccessDeniedException >&2; exit 254'", "AccessDenied", False),
        ("sh -c 'echo i-0 is not connected >&2; exit 254'", "i-0 is not connected", True),
        ("sh -c 'kill -9 $$'", "was ended by signal 9", True),
        ("true", "exited with 0", True),
        ("sh -c 'printf \"\\033[31mred\" >&2; exit 1'", "red", True),
    ],
)
def test_command_that_exits_at_once_is_explained(
    ssh_site: Site, command: str, message: str, retry: bool
) -> None:
    error = refusal(by(ssh_site, command))
    assert message in error.message
    assert "\033" not in error.message
    assert command.split()[0] in error.hint
    assert bool(error.patience) is retry


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sleep 1000", "the proxy command is silent"),
        ("sh -c 'echo waiting for a tunnel >&2; sleep 1000'", "is silent: waiting for a tunnel"),
        ("yes", "the proxy command does not speak SSH: it sent 'y'"),
        ("sh -c 'echo; echo; sleep 1000'", "the proxy command does not speak SSH: it sent"),
    ],
)
def test_command_without_ssh_is_described_as_such(ssh_site: Site, command: str, message: str) -> None:
    """Not as ended by the signal that cloudddp has sent it."""
    with pytest.raises(ConnectError) as caught:
        Connection.open(by(ssh_site, command), connect_timeout=0.5)
    error = caught.value
    assert message in error.message
    assert "signal" not in error.message
    assert f"does the proxy command connect? {command}" in error.hint
    assert error.patience > 0
    assert error.silent is ("silent" in message)


def test_tokens_are_those_of_ssh() -> None:
    values = {"%h": "i-0abc", "%n": "i-0abc", "%a": "10.0.0.4", "%p": "22", "%r": "ubuntu"}
    aws = "sh -c \"aws ssm start-session --target %h --parameters 'portNumber=%p'\""
    assert expand_proxy_command(aws, values).count("--target i-0abc ") == 1
    assert expand_proxy_command("nc %a %p # %r 100%%", values) == "nc 10.0.0.4 22 # ubuntu 100%"
    for value in ("i-0;reboot", "$(x)", "a b", "'", "é"):
        with pytest.raises(ValueError, match="cannot be part of a command"):
            expand_proxy_command("x %h", {**values, "%h": value})


def test_mode() -> None:
    command, jump = {"proxy_command": "x %h"}, {"proxy_jump": "b"}
    modes = [connection_mode(ClusterSpec(**settings)) for settings in ({}, jump, command)]  # type: ignore[arg-type]
    for given, mode in ((command, "public"), ({}, "private")):
        spec = ClusterSpec(**given, connect=mode)  # type: ignore[arg-type]
        assert list(connection(spec)) == []
        modes.append(connection_mode(spec))
    assert modes == ["public", "jump", "private", "public", "private"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"proxy_command": "x %"}, "unknown token %"),
        ({"proxy_command": "x %C"}, "unknown token %C"),
        ({"proxy_command": "x %d %h"}, "unknown token %d"),
        ({"connect": "jump"}, "no jump host"),
        ({"connect": "public", "proxy_jump": "ubuntu@198.51.100.9"}, "proxy_jump is set"),
        ({"proxy_command": "nc %h %p", "proxy_jump": "b"}, "exclude each other"),
        ({"proxy_jump": "b:99999"}, "no such port"),
    ],
)
def test_contradictions_and_unknown_tokens_are_refused(settings: dict[str, str], message: str) -> None:
    assert message in next(connection(ClusterSpec(**settings)))[0]

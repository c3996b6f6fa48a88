"""SSH connections through a jump host, by OpenSSH's `ssh -W`: strict host keys, and what goes wrong."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest
from support.harness import wait_for
from support.hostilessh import listening
from support.jumpserver import JumpServer
from support.programs import first_on_path, program
from support.sshserver import Site, refusal

from cloudddp.errors import ConnectError, NodeError, UsageError
from cloudddp.ssh.connection import Connection
from cloudddp.ssh.fleet import Fleet
from cloudddp.ssh.routes.jump import Jump, failure_in
from cloudddp.ssh.running import CommandSpec
from cloudddp.ssh.target import Target, generate_key


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path


@pytest.fixture
def jump(home: Path) -> Iterator[JumpServer]:
    server = JumpServer(home)
    server.write_ssh_files()
    yield server
    server.close()


@pytest.fixture
def target(ssh_site: Site, jump: JumpServer) -> Target:
    return ssh_site.target(ssh_site.server().port, route=Jump(jump.given))


def children() -> set[str]:
    """The ssh processes that this process has started."""
    shown = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "pid=,stat=,comm="],
        capture_output=True,
        text=True,
        check=False,
    )
    words = (line.split() for line in shown.stdout.splitlines())
    return {pid for pid, state, name in words if name == "ssh" and not state.startswith("Z")}


def test_each_node_has_a_process_that_ends_with_its_connection(ssh_site: Site, jump: JumpServer) -> None:
    route = Jump(jump.given)
    ports = [ssh_site.server().port for _ in range(3)]
    with Fleet({rank: ssh_site.target(port, route=route) for rank, port in enumerate(ports)}) as fleet:
        fleet.connect()
        found = fleet.each(lambda rank: fleet.run(rank, CommandSpec(f"echo {rank}")).stdout).all()
        assert found == {rank: b"%d\n" % rank for rank in range(3)}
        assert len(children()) == 3
    assert sorted(jump.streams) == sorted(("127.0.0.1", port) for port in ports)
    wait_for(lambda: not children(), "the processes have ended")


# In the place of ssh: records when it begins to log in, and when the node's first bytes have come.
SLOW_SSH = """#!{python}
import os, socket, sys, threading, time
host, port = sys.argv[sys.argv.index('-W') + 1].rsplit(':', 1)
def note(text):
    with open('{log}', 'a') as log: log.write(text)
note('+')
time.sleep(0.3)
s = socket.create_connection((host.strip('[]'), int(port)))
first = s.recv(65536)
note('-')
os.write(1, first)
def out():
    while data := s.recv(65536): os.write(1, data)
    os._exit(0)
threading.Thread(target=out, daemon=True).start()
while data := os.read(0, 65536): s.sendall(data)
"""


def test_few_connections_are_opened_at_a_time(
    ssh_site: Site, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sshd drops connections of those who have not logged in yet, if they are more than 10 (MaxStartups)."""
    log = home / "log"
    first_on_path(monkeypatch, home / "bin" / "ssh", SLOW_SSH.format(python=sys.executable, log=log))
    target = ssh_site.target(ssh_site.server().port, route=Jump("jumper@example.com"))
    with Fleet(dict.fromkeys(range(20), target)) as fleet:
        fleet.connect(connect_timeout=60.0)
    shown = log.read_text()
    assert shown.count("+") == 20
    most = max(shown[:at].count("+") - shown[:at].count("-") for at in range(len(shown) + 1))
    assert 2 <= most <= 8


def test_broken_connection_is_opened_again(target: Target, jump: JumpServer) -> None:
    with Fleet({0: target}) as fleet:
        fleet.connect()
        jump.drop()
        with pytest.raises(NodeError, match="broke"):
            fleet.run(0, CommandSpec("echo here"))
        # Names in known_hosts may be hashed.
        hashed = paramiko.HostKeys.hash_host(f"[127.0.0.1]:{jump.port}")
        jump.write_ssh_files(known=f"{hashed} {jump.known_line.split(maxsplit=1)[1]}")
        fleet.reconnect(0)
        data = bytes(range(256)) * (1 << 14)
        assert fleet.run(0, CommandSpec("cat", stdin=data, limit=1 << 24)).stdout == data
    assert len(jump.logins) == 2
    other = replace(target, host_keys=(generate_key().public,))
    assert re.search(r"node 0 \(i-0\).*host key is not the one recorded", refusal(other).message)


@pytest.mark.parametrize(
    ("known", "message", "hint"),
    [
        ("", "its host key is not in ~/.ssh/known_hosts", "`ssh -p {port} jumper@127.0.0.1`"),
        (
            f"[127.0.0.1]:{{port}} {generate_key().public}",
            "its host key is not the one in ~/.ssh/known_hosts",
            "ssh-keygen -R '[127.0.0.1]:{port}'",
        ),
        ("{line}@revoked * {key}", "revoked", ""),
    ],
    ids=["unknown", "changed", "revoked"],
)
def test_host_key_is_refused_and_not_added(
    target: Target, jump: JumpServer, home: Path, known: str, message: str, hint: str
) -> None:
    given = known.format(port=jump.port, line=jump.known_line, key=jump.known_line.split(maxsplit=1)[1])
    jump.write_ssh_files(known=given)
    error = refusal(target)
    assert message in error.message
    assert hint.format(port=jump.port) in error.hint
    assert (error.patience, jump.logins) == (0, [])
    assert (home / ".ssh" / "known_hosts").read_text() == given


@pytest.mark.parametrize("line", ["host ssh-ed25519 AAAA", "\0", "@revoked * ssh-ed25519 AAAA"])
def test_damaged_known_hosts_is_no_traceback(target: Target, jump: JumpServer, line: str) -> None:
    jump.write_ssh_files(known=f"{line}\n{jump.known_line}")
    try:
        Connection.open(target).close()
    except ConnectError as error:
        assert "known_hosts" in error.message


def test_key_of_the_agent_logs_in(target: Target, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("ssh-agent") is None:
        pytest.skip("needs ssh-agent")
    key = home / ".ssh" / "id_ed25519"
    key.chmod(0o600)
    path = str(home / "agent")
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            wait_for(lambda: probe.connect_ex(path) == 0, "the agent listens")  # a moment after it exists
        monkeypatch.setenv("SSH_AUTH_SOCK", path)
        subprocess.run(["ssh-add", "-q", str(key)], check=True)
        key.unlink()
        Connection.open(target).close()
    finally:
        agent.terminate()
        agent.wait()


def test_what_a_jump_host_does_not_allow_is_not_retried(target: Target, jump: JumpServer, home: Path) -> None:
    jump.allow = False
    refused = [refusal(target)]
    (home / ".ssh" / "id_ed25519").write_text(generate_key().private)
    refused.append(refusal(target))
    assert [error.patience for error in refused] == [0, 0]
    messages = [f"{error.message} {error.hint}" for error in refused]
    assert re.search("does not forward connections.* AllowTcpForwarding", messages[0], re.DOTALL)
    assert re.search("accepts none of your keys.*ssh-add", messages[1], re.DOTALL)


def test_node_or_jump_host_that_is_down_may_be_retried(
    ssh_site: Site, target: Target, jump: JumpServer
) -> None:
    server = ssh_site.server()
    booting = replace(target, port=server.port)
    server.close()
    ssh_site._servers.remove(server)
    jump_host = f"jump host jumper@127.0.0.1 port {jump.port}: connection refused"
    error = refusal(booting)
    assert re.search(r"node 0 \(i-0\).*cannot connect to it", error.message)
    assert error.patience > 0
    jump.stop()
    error = refusal(target)
    assert jump_host in error.message
    assert error.patience > 0
    jump.start(jump.port)
    Connection.open(target).close()


def test_jump_host_that_closes_connections_before_its_banner_names_penalties(
    ssh_site: Site, home: Path
) -> None:
    with listening(lambda peer: peer.shutdown(socket.SHUT_RDWR)) as port:
        error = refusal(ssh_site.target(22, route=Jump(f"jumper@127.0.0.1:{port}")))
    assert f"127.0.0.1 port {port}: the server closed the connection before its SSH banner" in error.message
    assert "PerSourcePenalties" in error.hint
    assert error.patience > 0


def test_user_configuration_names_the_jump_host(home: Path) -> None:
    (home / ".ssh").mkdir()
    (home / ".ssh" / "config").write_text("Host bastion\n HostName 198.51.100.7\n Port 2200\n User ops\n")
    found = Jump("bastion").host
    assert (found.host, found.port, found.user) == ("198.51.100.7", 2200, "ops")
    given = Jump("me@bastion:22").host
    assert (given.host, given.port, given.user) == ("198.51.100.7", 22, "me")
    (home / ".ssh" / "config").write_text("Host bastion\n NoSuchOption x\n")
    with pytest.raises(UsageError, match="ssh cannot read the settings of the jump host bastion: ") as caught:
        _ = Jump("bastion").host
    assert "~/.ssh/config" in caught.value.hint


def test_jump_host_behind_another_one(ssh_site: Site, jump: JumpServer, home: Path) -> None:
    """As the user's configuration says."""
    config = f"Host inner\n HostName 127.0.0.1\n Port {jump.port}\n User jumper\n ProxyCommand nc %h %p\n"
    if shutil.which("nc") is None:
        carries = program(home / "nc.py", SLOW_SSH.format(python=sys.executable, log=home / "log"))
        config = config.replace("nc %h %p", f"{carries} -W [%h]:%p")
    (home / ".ssh" / "config").write_text(config)
    target = ssh_site.target(ssh_site.server().port, route=Jump("inner"))
    connection = Connection.open(target)
    assert connection.run(CommandSpec("echo here")).stdout == b"here\n"
    connection.close()


@pytest.mark.parametrize(
    "given", ["-oProxyCommand=x", "-l@host", "u@-host", "", "a b:x", "u@[::1]x", "[-V]", "[[-V]"]
)
def test_what_ssh_would_take_for_an_option_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="not a jump host"):
        Jump(given)


def test_missing_ssh_is_one_sentence(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        UsageError, match=r"needs OpenSSH's `ssh`, which is not installed: install openssh-client$"
    ):
        Connection.open(target)


REVOKED = "@       WARNING: REVOKED HOST KEY DETECTED!               @"
CHANGED = "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @"
FORBIDDEN = "channel 0: open failed: administratively prohibited: open failed"
NO_ROUTE = "channel 0: open failed: connect failed: No route to host"
CLOSED = "kex_exchange_identification: Connection closed by remote host"


@pytest.mark.parametrize(
    ("errors", "kind", "line"),
    [
        ("No ED25519 host key is known for b.\r\nHost key verification failed.\r\n", "unknown", "Host key"),
        (f"@@@@\r\n{CHANGED}\r\nHost key verification failed.\r\n", "changed", CHANGED),
        (f"@@@@\r\n{REVOKED}\r\nHost key verification failed.\r\n", "revoked", REVOKED),
        (
            "Welcome!\r\nu@b: Permission denied (publickey).\r\n",
            "login",
            "u@b: Permission denied (publickey).",
        ),
        ("Received disconnect from ::1 port 22:2: Too many authentication failures", "login", "Received"),
        (f"{FORBIDDEN}\r\nstdio forwarding failed\r\n", "forbidden", FORBIDDEN),
        (f"{NO_ROUTE}\r\nstdio forwarding failed\r\n", "node", NO_ROUTE),
        (f"{CLOSED}\r\nConnection closed by 127.0.0.1 port 22\r\n", "early close", CLOSED),
        ("ssh: connect to host b port 22: Connection refused\r\n", "refused", "ssh: connect to host b"),
        ("ssh: connect to host b port 22: Connection timed out\r\n", "silent", "ssh: connect to host b"),
        ("ssh: Could not resolve hostname b: Name or service not known\r\n", "", "ssh: Could not resolve"),
        ("\033[31mred", "", "\\x1b[31mred"),
        ("", "", ""),
    ],
)
def test_what_ssh_writes_is_understood(errors: str, kind: str, line: str) -> None:
    found, shown = failure_in(errors)
    assert found == kind
    assert shown.startswith(line)
    assert "\033" not in shown

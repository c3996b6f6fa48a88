"""SSH connections through a jump host: one login for all nodes, strict host keys, and what goes wrong."""

from __future__ import annotations

import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from support.hostilessh import listening
from support.jumpserver import JumpServer
from support.sshserver import Site, site

from cloudddp.errors import ConnectError, UsageError, render
from cloudddp.ssh import keys
from cloudddp.ssh.connection import Connection
from cloudddp.ssh.fleet import Fleet
from cloudddp.ssh.routes.jump import Jump
from cloudddp.ssh.routes.user_config import jump_host
from cloudddp.ssh.running import CommandSpec
from cloudddp.ssh.target import Target


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path


@pytest.fixture
def ssh_site(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as created:
        yield created


@pytest.fixture
def jump(home: Path) -> Iterator[JumpServer]:
    server = JumpServer(home)
    server.write_ssh_files()
    yield server
    server.close()


@pytest.fixture
def target(ssh_site: Site, jump: JumpServer) -> Iterator[Target]:
    route = Jump(jump.given)
    yield ssh_site.target(ssh_site.server().port, route=route)
    route.close()


def refusal(target: Target) -> ConnectError:
    with pytest.raises(ConnectError) as caught:
        Connection.open(target, connect_timeout=10.0)
    return caught.value


def test_all_nodes_share_one_login(ssh_site: Site, jump: JumpServer) -> None:
    route = Jump(jump.given)
    ports = [ssh_site.server().port for _ in range(5)]
    with Fleet({rank: ssh_site.target(port, route=route) for rank, port in enumerate(ports)}) as fleet:
        fleet.connect()
        assert [fleet.run(rank, CommandSpec(f"echo {rank}")).stdout for rank in range(5)] == [
            b"%d\n" % rank for rank in range(5)
        ]
    assert jump.logins == [jump.user]
    assert sorted(jump.streams) == sorted(("127.0.0.1", port) for port in ports)


def test_fleets_share_a_route_until_the_last_is_closed(target: Target, jump: JumpServer) -> None:
    """As `down` does, which asks each node in a fleet of its own what was not pulled."""
    first, second = Fleet({0: target}), Fleet({1: target})
    first.connect()
    second.connect()
    first.close()
    first.close()
    assert second.run(1, CommandSpec("echo here")).stdout == b"here\n"
    second.close()
    with pytest.raises(ConnectError, match="was closed"):
        Connection.open(target)
    with Fleet({0: target}) as third:
        third.connect()
    assert len(jump.logins) == 2


def test_megabytes_pass_unchanged(target: Target) -> None:
    connection = Connection.open(target)
    data = bytes(range(256)) * (1 << 14)
    assert connection.run(CommandSpec("cat", stdin=data, limit=1 << 24)).stdout == data
    connection.close()


def test_broken_connection_is_opened_again(target: Target, jump: JumpServer) -> None:
    with Fleet({0: target}) as fleet:
        fleet.connect()
        jump.drop()
        with pytest.raises(Exception, match="broke"):
            fleet.run(0, CommandSpec("echo here"))
        fleet.reconnect(0)
        assert fleet.run(0, CommandSpec("echo here")).stdout == b"here\n"
    assert len(jump.logins) == 2


def test_node_with_a_wrong_host_key_is_refused(ssh_site: Site, jump: JumpServer) -> None:
    expected = keys.generate().public
    target = ssh_site.target(ssh_site.server().port, route=Jump(jump.given), host_keys=(expected,))
    error = refusal(target)
    assert "node 0 (i-0)" in error.message
    assert "host key is not the one recorded" in error.message


def test_unknown_host_key_is_refused_and_not_added(target: Target, jump: JumpServer, home: Path) -> None:
    jump.write_ssh_files(known="")
    error = refusal(target)
    assert "its host key is not in ~/.ssh/known_hosts" in error.message
    assert "ssh-ed25519 SHA256:" in error.message
    assert f"`ssh -p {jump.port} jumper@127.0.0.1`" in render(error.hint)
    assert error.patience == 0
    assert jump.logins == []
    assert (home / ".ssh" / "known_hosts").read_text() == ""


def test_changed_host_key_is_refused(target: Target, jump: JumpServer) -> None:
    jump.write_ssh_files(known=f"[127.0.0.1]:{jump.port} {keys.generate().public}\n")
    error = refusal(target)
    assert "its host key is not the one in ~/.ssh/known_hosts" in error.message
    assert f"ssh-keygen -R '[127.0.0.1]:{jump.port}'" in render(error.hint)
    assert jump.logins == []


def test_hashed_known_hosts_are_understood(target: Target, jump: JumpServer) -> None:
    hashed = paramiko.HostKeys.hash_host(f"[127.0.0.1]:{jump.port}")
    jump.write_ssh_files(known=f"{hashed} {jump.known_line.split(maxsplit=1)[1]}")
    Connection.open(target).close()


@pytest.mark.parametrize(
    "line", ["host ssh-ed25519 AAAA", "x" * 5000, "\0", "@revoked * ssh-ed25519 AAAA", "a ssh-rsa !!"]
)
def test_damaged_known_hosts_is_no_traceback(target: Target, jump: JumpServer, line: str) -> None:
    jump.write_ssh_files(known=f"{line}\n{jump.known_line}")
    try:
        Connection.open(target).close()
    except ConnectError as error:
        assert "known_hosts" in error.message


def test_revoked_host_key_is_refused(target: Target, jump: JumpServer) -> None:
    jump.write_ssh_files(known=f"{jump.known_line}@revoked * {jump.known_line.split(maxsplit=1)[1]}")
    assert "revoked" in refusal(target).message
    assert jump.logins == []


def test_key_that_is_not_accepted(target: Target, home: Path) -> None:
    (home / ".ssh" / "id_ed25519").write_text(keys.generate().private)
    error = refusal(target)
    assert "accepts none of your keys" in error.message
    assert "ssh-add" in render(error.hint)
    assert error.patience == 0


def test_key_of_the_agent_logs_in(target: Target, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("ssh-agent") is None:
        pytest.skip("needs ssh-agent")
    key = home / ".ssh" / "id_ed25519"
    key.chmod(0o600)
    socket = home / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            assert agent.poll() is None
            time.sleep(0.01)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        subprocess.run(["ssh-add", "-q", str(key)], check=True)
        key.unlink()
        Connection.open(target).close()
    finally:
        agent.terminate()
        agent.wait()


def test_forwarding_that_is_forbidden(target: Target, jump: JumpServer) -> None:
    jump.allow = False
    error = refusal(target)
    assert "does not forward connections" in error.message
    assert "AllowTcpForwarding" in render(error.hint)
    assert error.patience == 0


def test_node_that_is_booting_may_be_retried(ssh_site: Site, jump: JumpServer) -> None:
    server = ssh_site.server()
    port = server.port
    server.close()
    ssh_site._servers.clear()
    error = refusal(ssh_site.target(port, route=Jump(jump.given)))
    assert "cannot connect to it" in error.message
    assert "node 0 (i-0)" in error.message
    assert error.patience > 0


def test_jump_host_that_is_down_may_be_retried(target: Target, jump: JumpServer) -> None:
    jump.stop()
    error = refusal(target)
    assert f"jump host jumper@127.0.0.1 port {jump.port}: connection refused" in error.message
    assert error.patience > 0
    jump.start(jump.port)
    Connection.open(target).close()


def test_jump_host_that_closes_connections_before_its_banner_names_penalties(
    ssh_site: Site, home: Path
) -> None:
    with listening(lambda peer: peer.shutdown(socket.SHUT_RDWR)) as port:
        error = refusal(ssh_site.target(22, route=Jump(f"jumper@127.0.0.1:{port}")))
    assert f"127.0.0.1 port {port}: the server closed the connection before its SSH banner" in error.message
    assert "PerSourcePenalties" in render(error.hint)
    assert error.patience > 0


def test_user_configuration_names_the_jump_host(home: Path) -> None:
    key = home / "key"
    key.write_text("")
    (home / ".ssh").mkdir()
    (home / ".ssh" / "config").write_text(
        f"Host bastion\n HostName 198.51.100.7\n Port 2200\n User ops\n IdentityFile {key}\n IdentityFile /nowhere\n"
    )
    found = jump_host("bastion")
    assert (found.host, found.port, found.user, found.keys) == ("198.51.100.7", 2200, "ops", (str(key),))
    given = jump_host("me@bastion:22")
    assert (given.port, given.user, given.known_as) == (22, "me", "198.51.100.7")


def test_user_without_an_account_is_named_by_the_configuration(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container whose uid has no entry in passwd, and no USER."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)

    def no_entry(_: object) -> None:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    with pytest.raises(UsageError) as caught:
        jump_host("bastion")
    assert "cannot find the user name" in caught.value.message
    assert "USER@HOST" in render(caught.value.hint)
    assert jump_host("ops@bastion").user == "ops"
    (home / ".ssh").mkdir()
    (home / ".ssh" / "config").write_text("Host *\n User joe\n IdentityFile ~/.ssh/%r\n")
    assert jump_host("bastion").user == "joe"
    (home / ".ssh" / "config").write_text("Host *\n Port 2200\n")
    assert (jump_host("ops@bastion").user, jump_host("ops@bastion").port) == ("ops", 2200)
    with pytest.raises(UsageError):
        jump_host("bastion")


@pytest.mark.parametrize(
    "text", ["Host bastion\n ProxyJump other\n", "Host bastion\n ProxyCommand nc %h %p\n", "Match exec x\n"]
)
def test_user_configuration_that_cannot_be_followed(home: Path, text: str) -> None:
    (home / ".ssh").mkdir()
    (home / ".ssh" / "config").write_text(text)
    with pytest.raises(UsageError) as caught:
        jump_host("bastion")
    assert "proxy_command" in render(caught.value.hint)

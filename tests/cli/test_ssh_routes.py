"""Settings of the way to the nodes, on process nodes; the networks themselves are in tests/lab/product."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jumphost import rules
from support.jumpserver import JumpServer

SESSION = f"{sys.executable} -m cloudddp sim session --target %h --port %p"


def folder_of(cli: Any) -> Path:
    (found,) = [
        path.parent
        for path in Path(cli.env["CLOUDDDP_HOME"]).glob("clusters/*/cluster.json")
        if json.loads(path.read_text())["name"] == cli.cluster
    ]
    return found


def test_proxy_command_is_remembered(cli: Any, ec2: Any) -> None:
    cli.ok("up", "-n", "2", "--proxy-command", SESSION)
    (cluster,) = json.loads(cli.ok("status", "--json"))
    assert [node["public_ip"] for node in cluster["nodes"]] == ["", ""]
    assert rules(ec2, cli.cluster) == []
    assert cli.ok("exec", "--", "echo here").count("here") == 2
    assert "is already up" in cli.ok("up", "-n", "2")


def test_private_nodes_have_no_public_address(cli: Any, ec2: Any) -> None:
    shown = cli("up", "-n", "1", "--connect", "private", "--ssh-from", "127.0.0.0/8")
    assert shown.returncode == 0, shown.stderr
    assert "SSH by private address; the nodes have no public address" in shown.stderr
    assert rules(ec2, cli.cluster) == ["127.0.0.0/8"]
    refused = cli("allow-me")
    assert refused.returncode == 2
    assert 'does not apply to connect = "private"' in refused.stderr
    assert "here" in cli.ok("exec", "--", "echo here")


def test_damaged_record_is_an_error_or_ignored(cli: Any) -> None:
    cli.ok("up", "-n", "1", "--proxy-command", SESSION)
    path = folder_of(cli) / "cluster.json"
    record = json.loads(path.read_text())
    for content in ('"a\\u0000b"', "7", '"x %C"', '["x"]', "null"):
        path.write_text(json.dumps({**record, "proxy_command": "REPLACED"}).replace('"REPLACED"', content))
        refused = cli("exec", "--", "true")
        assert refused.returncode in (1, 2), content
        assert "a bug in cloudddp" not in refused.stderr


def test_dry_run_needs_no_jump_host(cli: Any) -> None:
    shown = cli.ok("up", "--dry-run", "--proxy-jump", "ubuntu@198.51.100.9")
    assert '"AssociatePublicIpAddress": false' in shown
    assert '"CidrIp": "10.0.0.10/32"' in shown


def test_jump_host_outside_the_account_needs_ssh_from(cli: Any, tmp_path: Path) -> None:
    jump = JumpServer(tmp_path)
    jump.write_ssh_files()
    cli.env.update(HOME=str(tmp_path), CLOUDDDP_PROXY_JUMP=jump.given)
    refused = cli("up", "-n", "1")
    assert refused.returncode == 2
    assert "no EC2 instance in us-east-1 has this address" in refused.stderr
    assert "--ssh-from" in refused.stderr
    cli.ok("up", "-n", "2", "--ssh-from", "127.0.0.1/32")
    assert cli.ok("exec", "--", "echo here").count("here") == 2
    # The checks of both `up`; then for each node: `up`, the same with its new host key, and `exec`.
    assert len(jump.logins) == 2 + 2 * 3
    jump.close()


def test_jump_host_that_does_not_speak_ssh_is_no_traceback(cli: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        cli.env.update(HOME=str(tmp_path))
        refused = cli("up", "--proxy-jump", f"a@127.0.0.1:{port}", "--ssh-from", "127.0.0.1/32")
    assert refused.returncode == 1
    lines = [line for line in refused.stderr.splitlines() if not line.startswith("your cluster ")]
    assert len(lines) == 3, refused.stderr
    assert f"logging in to the jump host a@127.0.0.1:{port}, for up to 10 s\n" in refused.stderr
    assert f"jump host a@127.0.0.1 port {port}: " in refused.stderr


def test_unreachable_jump_host_is_described_without_a_number(cli: Any, tmp_path: Path) -> None:
    """TCP to the broadcast address fails in this computer, with ENETUNREACH (or EACCES)."""
    cli.env.update(HOME=str(tmp_path))
    refused = cli("up", "--proxy-jump", "a@255.255.255.255", "--ssh-from", "127.0.0.1/32")
    assert refused.returncode == 1
    assert re.search(r"jump host a@255\.255\.255\.255 port 22: [A-Z][a-z ]+\n", refused.stderr), (
        refused.stderr
    )


@pytest.mark.parametrize(
    ("given", "config"),
    [
        ("u@bastion..example.com", ""),
        (f"u@{'a' * 70}.example.com", ""),
        ("bastion", "Host bastion\n HostName bad..name\n User u\n"),
        ("bastion", f"Host bastion\n HostName {'b' * 300}\n User u\n"),
    ],
)
def test_jump_host_whose_name_is_invalid_is_a_usage_error(
    cli: Any, faults: Any, tmp_path: Path, given: str, config: str
) -> None:
    """RFC 1035, section 2.3.4: a label has 1 to 63 characters."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(config)
    cli.env.update(HOME=str(tmp_path))
    for words in (("up", "-n", "1", "--ssh-from", "10.0.0.1/32"), ("up", "-n", "1")):
        refused = cli(*words, "--proxy-jump", given)
        assert refused.returncode == 2, refused.stderr
        assert "is not a host name" in refused.stderr
        assert ("~/.ssh/config" if config else "proxy_jump") in refused.stderr
    assert faults.count("ImportKeyPair") == 0


@pytest.fixture
def jump(cli: Any, tmp_path: Path) -> Iterator[JumpServer]:
    """A jump host outside the account, and a user who knows it."""
    server = JumpServer(tmp_path)
    server.write_ssh_files()
    cli.env.update(HOME=str(tmp_path), CLOUDDDP_SSH_FROM="127.0.0.1/32", CLOUDDDP_RENDEZVOUS="direct")
    yield server
    server.close()


def test_down_asks_every_node_through_the_jump_host(cli: Any, jump: JumpServer) -> None:
    cli.ok("up", "-n", "3", "--proxy-jump", jump.given)
    cli.write(
        "make.py", "import pathlib\npathlib.Path('runs').mkdir()\npathlib.Path('runs/a').write_text('a')\n"
    )
    cli.ok("launch", "--nproc-per-node", "1", "make.py")
    done = cli("down")
    assert done.returncode == 0
    assert [f"not pulled from node {rank}: " in done.stderr for rank in range(3)] == [True] * 3, done.stderr
    assert "did not answer" not in done.stderr


def test_down_works_without_the_jump_host(cli: Any, jump: JumpServer) -> None:
    cli.ok("up", "-n", "2", "--proxy-jump", jump.given)
    jump.stop()
    done = cli("down")
    assert done.returncode == 0, done.stderr
    assert "did not answer: jobs and results there are unknown" in done.stderr
    jump.start(jump.port)

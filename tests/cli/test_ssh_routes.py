"""Settings of the way to the nodes, on process nodes; the networks themselves are in tests/lab/product."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.jumphost import rules
from support.jumpserver import JumpServer

SESSION = f"{sys.executable} -m cloudddp sim session --target %h --port %p"


def test_proxy_command_is_remembered(cli: Any, ec2: Any, simulator: Any) -> None:
    """In a record that may be damaged."""
    cli.ok("up", "-n", "1", "--proxy-command", SESSION)
    (cluster,) = json.loads(cli.ok("status", "--json"))
    assert [node["public_ip"] for node in cluster["nodes"]] == [""]
    assert rules(ec2, cli.cluster, simulator.ssh_port) == []
    assert "here" in cli.ok("exec", "--", "echo here")
    path = Path(cli.env["CLOUDDDP_HOME"]) / "clusters" / cluster["cluster_id"] / "cluster.json"
    text = path.read_text()
    record = json.dumps({**json.loads(text), "proxy_command": "REPLACED"})
    for content in ('"a\\u0000b"', '"x %C"'):
        path.write_text(record.replace('"REPLACED"', content))
        refused = cli("exec", "--", "true")
        assert refused.returncode in (1, 2), content
        assert "a bug in cloudddp" not in refused.stderr
    path.write_text(text)


def test_jump_host_outside_the_account_needs_ssh_from(cli: Any, tmp_path: Path) -> None:
    jump = JumpServer(tmp_path)
    jump.write_ssh_files()
    cli.env.update(HOME=str(tmp_path), CLOUDDDP_PROXY_JUMP=jump.given)
    refused = cli.fails(2, "up", "-n", "1")
    assert "no EC2 instance in us-east-1 has this address" in refused
    assert "--ssh-from" in refused
    cli.ok("up", "-n", "2", "--ssh-from", "127.0.0.1/32")
    assert cli.ok("exec", "--", "echo here").count("here") == 2
    # The checks of both `up`; then for each node: `up`, the same with its new host key, and `exec`.
    assert len(jump.logins) == 2 + 2 * 3
    jump.stop()
    assert "did not answer: jobs and results there are unknown" in cli.messages("down")
    jump.start(jump.port)
    jump.close()


@pytest.mark.parametrize(
    ("given", "config"),
    [
        ("u@bastion..example.com", ""),
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
    refused = cli.fails(2, "up", "-n", "1", "--proxy-jump", given)
    assert "is not a host name" in refused
    assert ("~/.ssh/config" if config else "proxy_jump") in refused
    assert faults.count("ImportKeyPair") == 0

"""The nodes in OpenSSH's configuration: routes, and the line in ~/.ssh/config."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.harness import cannot
from support.instances import inventory_instance

from cloudddp.cluster import ssh_hosts
from cloudddp.cluster.model import Cluster
from cloudddp.local_state import ClusterFolder
from cloudddp.ssh import openssh
from cloudddp.ssh.routes.command import ProxyCommand
from cloudddp.ssh.target import Target
from cloudddp.tags import Tags


def asked(config: str, name: str, tmp_path: Path) -> list[str]:
    """Return what `ssh -G` makes of a configuration for a host."""
    if shutil.which("ssh") is None:
        cannot("OpenSSH's client is not installed")
    (tmp_path / "config").write_text(config)
    words = ["ssh", "-G", "-F", str(tmp_path / "config"), name]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


def test_proxy_command_has_the_region_and_no_token_of_openssh(tmp_path: Path) -> None:
    """It runs without cloudddp's environment; its own tokens were replaced before. Hosts do not mix: x-1 is
    not x-11."""
    route = ProxyCommand("sh -c 'aws ssm start-session --target i-1 %'", {"AWS_REGION": "eu-west-1"})
    key = tmp_path / "a key"
    hosts = {
        "x-1": Target("node 1", "10.0.0.1", 2222, "ec2-user", key, ("ssh-ed25519 A",), route),
        "x-11": Target("node 11", "10.0.0.11", 22, "ubuntu", key, ("ssh-ed25519 B",)),
    }
    config = openssh.config(hosts, tmp_path / "known hosts")
    found = asked(config, "x-1", tmp_path)
    command = "env AWS_REGION=eu-west-1 sh -c 'aws ssm start-session --target i-1 %%'"
    assert f"proxycommand {command}" in found
    assert {"hostname 10.0.0.1", "port 2222", "user ec2-user", "identitiesonly yes"} <= set(found)
    assert not any(line.startswith("proxycommand") for line in asked(config, "x-11", tmp_path))
    assert f"hostname {(other := 'other')}" in asked(config, other, tmp_path)
    for line in ("ProxyJump bastion.test", "ProxyCommand nc %h %p"):  # of the user, for all hosts
        of_user = f"{config}\nHost *\n  {line}\n"
        assert any(one.startswith(("proxyjump", "proxycommand")) for one in asked(of_user, other, tmp_path))
        direct = asked(of_user, "x-11", tmp_path)
        assert not any(one.startswith(("proxyjump", "proxycommand")) for one in direct)
        assert f"proxycommand {command}" in asked(of_user, "x-1", tmp_path)


def test_line_includes_the_hosts_of_every_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the state folder is called: OpenSSH takes the name for a pattern, and expands % and $."""
    monkeypatch.setenv("CLOUDDDP_HOME", str(tmp_path / 'a"b [c] %d$e'))
    assert openssh.include_line() == f'Include "{tmp_path}/a?b ?c? ?d?e/clusters/*/ssh_config"'


def cluster(nodes: int) -> Cluster:
    """The cluster x with one node, of so many."""
    tags = Tags(cluster="x", cluster_id="c-0123456789", nodes=nodes)
    return Cluster.of([inventory_instance("i-1", tags)], name="x", cluster_id="c-0123456789", region="r")


def test_hosts_are_replaced_but_not_by_a_part_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes may have new addresses and keys. An error is a warning."""
    monkeypatch.setenv("CLOUDDDP_HOME", str(tmp_path))
    folder, warnings = ClusterFolder("c-0123456789"), list[str]()
    for address, nodes, known in (("10.0.0.1", 1, 1), ("10.0.0.2", 1, 2), ("10.0.0.3", 2, 2)):
        target = Target("node 0", address, 22, "ubuntu", tmp_path / "key", (f"ssh-ed25519 {address}",))
        ssh_hosts.update(cluster(nodes), {0: target}, warnings.append)
        assert f"HostName 10.0.0.{known}\n" in folder.ssh_config.read_text()
        assert folder.known_hosts.read_text() == f"10.0.0.{known} ssh-ed25519 10.0.0.{known}\n"
    folder.ssh_config.unlink()
    folder.ssh_config.mkdir()
    assert warnings == []
    ssh_hosts.update(cluster(1), {}, warnings.append)
    assert str(warnings[0]).startswith("warning: cannot update the OpenSSH configuration: ")

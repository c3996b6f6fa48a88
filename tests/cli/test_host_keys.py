"""Host keys: each node gets its own, nothing else is accepted; an interrupted replacement is completed."""

from __future__ import annotations

import base64
import ipaddress
import json
import re
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest
from support.harness import listed_nodes, wait_for
from support.sshserver import Server, Site

from cloudddp.cluster import host_keys
from cloudddp.cluster.host_keys import KnownKeys, NodeKeys
from cloudddp.errors import CloudDDPError, ConnectError, NodeError
from cloudddp.local_state import ClusterFolder, ClusterRecord
from cloudddp.ssh.connection import Connection
from cloudddp.ssh.fleet import Fleet
from cloudddp.ssh.target import KEY_HEADER, public_key

RECORD = ClusterRecord("c-1111111111", "demo", "us-east-1", "", "")
SHARED, OWN, OTHER = (
    f"ssh-ed25519 {base64.b64encode(KEY_HEADER + 32 * letter).decode()}" for letter in (b"s", b"o", b"x")
)


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    new = ClusterFolder("c-1111111111", root=tmp_path)
    new.create(RECORD, private_key="PRIVATE\n", host_public=SHARED)
    new.journal_created(["i-0", "i-1"])
    return new


# -- records --------------------------------------------------------------------------


@pytest.mark.parametrize("text", [OWN, f"{OWN} root@node", f"{OWN}\n", f"  {OWN} a b c\r\n"])
def test_public_key_is_normalized(text: str) -> None:
    assert public_key(text) == OWN


INVALID = [
    *["", "ssh-ed25519", "ssh-ed25519 AAAA", OWN[:-4], OWN + "AAAA", OWN.replace("ssh-ed25519", "ssh-rsa")],
    *[f'command="x" {OWN}', OWN + " " * 2000, OWN + "\x00"],
    "ssh-ed25519 " + base64.b64encode(b"\0\0\0\x07ssh-rsa\0\0\0 " + bytes(36)).decode(),
]


@pytest.mark.parametrize("text", INVALID, ids=lambda text: repr(text[:99]))
def test_invalid_public_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ssh-ed25519"):
        public_key(text)


@pytest.mark.parametrize(
    ("shared", "created", "node", "accepted"),
    [
        (SHARED, {"i-0"}, None, (SHARED,)),
        (SHARED, set(), None, (SHARED,)),  # `up` was killed before the answer of RunInstances
        (SHARED, {"i-1"}, None, ()),
        ("", {"i-0"}, None, ()),
        (SHARED, {"i-0"}, NodeKeys(pending=OWN), (OWN, SHARED)),
        (SHARED, {"i-0"}, NodeKeys(current=OWN), (OWN,)),
        ("", {"i-0"}, NodeKeys(current=OWN), (OWN,)),
    ],
)
def test_accepted_keys(
    shared: str, created: set[str], node: NodeKeys | None, accepted: tuple[str, ...]
) -> None:
    known = KnownKeys(shared, frozenset(created), {"i-0": node} if node else {})
    assert known.accepted("i-0") == accepted


DAMAGED = [
    *["", "[]", '{"i-0": {}}', '{"i-0": {"current": "x"}}', "[" * 100_000],
    json.dumps({"i-0": {"current": OWN, "pending": OTHER}}),
    json.dumps({"i-0": {"current": OWN + " x"}}),
]


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: repr(text[:99]))
def test_damaged_host_keys_are_refused(folder: ClusterFolder, text: str) -> None:
    folder.host_keys.write_text(text)
    with pytest.raises(CloudDDPError, match=r"host_keys\.json") as caught:
        host_keys.read(folder)
    assert "cloudddp down" in caught.value.hint


def test_created_instances_from_a_truncated_journal(folder: ClusterFolder) -> None:
    lines = '{"event": "made", "instances": ["i-2", 7, null]}\n[]\nnull\n{"event": "made"}\n{"event": "ma'
    with (folder.path / "journal.jsonl").open("a") as journal:
        journal.write(lines)
    assert folder.created_instances() == {"i-0", "i-1", "i-2"}
    assert ClusterFolder("c-2222222222", root=folder.path.parent.parent).created_instances() == frozenset()


# -- a real SSH server in place of a node -----------------------------------------------------------------


@pytest.fixture
def cluster(ssh_site: Site, tmp_path: Path) -> ClusterFolder:
    new = ClusterFolder("c-1111111111", root=tmp_path)
    new.create(RECORD, private_key="PRIVATE\n", host_public=ssh_site.host.public)
    return new


def sudo(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Replace `sudo` on the server: the real one must not run anything on this computer."""
    (folder / "bin").mkdir()
    (folder / "bin" / "sudo").write_text(f"#!/bin/sh\ncat > /dev/null\n{text}\n")
    (folder / "bin" / "sudo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")


def replace_keys(fleet: Fleet, folder: ClusterFolder) -> None:
    host_keys.replace_shared_key(fleet, folder, {0: "i-0"}, whole=True, partly=False, progress=lambda _: None)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("echo", "cannot read its new host key"),
        ("printf '\\377\\n'", "cannot read its new host key"),
        ("echo '$SHARED'", "is not unique"),
        ("yes ssh-ed25519 | head -c 3000000", "longer than 1 MiB"),
        ("echo 'sudo: a password is required' >&2; exit 1", "sudo: a password is required"),
    ],
)
def test_node_without_new_key_is_refused(
    ssh_site: Site,
    cluster: ClusterFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    output: str,
    message: str,
) -> None:
    sudo(tmp_path, monkeypatch, output.replace("$SHARED", ssh_site.host.public))
    with Fleet({0: ssh_site.target(ssh_site.server().port)}) as fleet:
        fleet.connect()
        with pytest.raises(NodeError, match=message):
            replace_keys(fleet, cluster)
    assert host_keys.read(cluster).accepted("i-0") == (ssh_site.host.public,)


def test_node_that_does_not_present_its_new_key_is_refused(
    ssh_site: Site, cluster: ClusterFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sudo(tmp_path, monkeypatch, f"echo {OWN}")
    server = ssh_site.server()
    # The clock passes _RELOAD_SECONDS after the second reconnect: the first is retried, the second is final.
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: 1e6 if len(server.connections) > 2 else 0.0)
    monkeypatch.setattr(host_keys, "time", clock)
    with Fleet({0: ssh_site.target(server.port)}) as fleet:
        fleet.connect()
        with pytest.raises(ConnectError, match="not the one recorded for this node: refused"):
            replace_keys(fleet, cluster)
    assert host_keys.read(cluster).accepted("i-0") == (OWN, ssh_site.host.public)
    assert cluster.host_key.exists()
    assert len(server.connections) == 3
    assert len(server.logins) == 1


def test_shared_key_of_a_replacement_is_not_deleted_by_another_command(
    ssh_site: Site, cluster: ClusterFolder
) -> None:
    """It has listed the nodes before the one that is launched now."""
    cluster.write(cluster.host_keys, json.dumps({"i-0": {"current": ssh_site.host.public}}))
    cluster.write(cluster.host_key, OTHER)
    with Fleet({0: ssh_site.target(ssh_site.server().port)}) as fleet:
        fleet.connect()
        with cluster.resuming():
            replace_keys(fleet, cluster)
            assert host_keys.read(cluster).shared == OTHER
        replace_keys(fleet, cluster)
    assert host_keys.read(cluster).shared == ""


def test_connection_knows_which_of_two_keys_was_presented(ssh_site: Site) -> None:
    server = ssh_site.server()
    for accepted in ((OWN, ssh_site.host.public), (ssh_site.host.public, OWN)):
        connection = Connection.open(ssh_site.target(server.port, host_keys=accepted))
        assert connection.host_key == ssh_site.host.public
        connection.close()
    with pytest.raises(ConnectError, match="refused"):
        Connection.open(ssh_site.target(server.port, host_keys=(OWN, OTHER)))
    assert len(server.logins) == 2


def test_node_without_recorded_key_is_not_contacted(ssh_site: Site) -> None:
    server = ssh_site.server()
    with pytest.raises(ConnectError, match="no host key is recorded for it"):
        Connection.open(ssh_site.target(server.port, host_keys=()))
    assert server.connections == []


# -- whole clusters ------------------------------------------------------------------------------------------


def recorded(cli: Any) -> ClusterFolder:
    (status,) = json.loads(cli.ok("status", "--json"))
    return ClusterFolder(status["cluster_id"], root=Path(cli.env["CLOUDDDP_HOME"]))


def presented(address: str, port: int) -> str:
    """The host key that a server presents, according to plain paramiko."""
    transport = paramiko.Transport((address, port))
    try:
        transport.start_client(timeout=300)
        key = transport.get_remote_server_key()
        return f"{key.get_name()} {key.get_base64()}"
    finally:
        transport.close()


def shared_key(ec2: Any, instance: str) -> tuple[str, str]:
    """The private and the public host key in the user data of an instance."""
    answer = ec2.describe_instance_attribute(InstanceId=instance, Attribute="userData")
    text = base64.b64decode(answer["UserData"]["Value"]).decode()
    both = json.loads(text.partition("\n")[2])["ssh_keys"]
    return both["ed25519_private"], both["ed25519_public"]


def check_own_keys(cli: Any, simulator: Any, ec2: Any) -> None:
    """Every node presents its own, recorded key; the one in the user data is accepted nowhere."""
    found = listed_nodes(cli)
    now = [presented(node["public_ip"], simulator.ssh_port) for node in found]
    assert len({*now, shared_key(ec2, found[0]["instance_id"])[1]}) == len(found) + 1
    known = host_keys.read(recorded(cli))
    assert [known.accepted(node["instance_id"]) for node in found] == [(key,) for key in now]
    assert known.shared == ""


def test_up_after_killed_up_completes_the_keys_and_a_stolen_one_impersonates_no_node(
    cli: Any, simulator: Any, faults: Any, ec2: Any
) -> None:
    """A cluster of a version without own keys looks the same. `up` is killed before the answer of
    RunInstances."""
    launched, release = faults.hold("RunInstances")
    process = cli.start("up", "-n", "2")
    assert launched.wait(60)
    process.kill()
    process.communicate()
    release.set()
    wait_for(lambda: {node["state"] for node in listed_nodes(cli)} == {"running"}, "the nodes run")
    found = listed_nodes(cli)
    before = {presented(node["public_ip"], simulator.ssh_port) for node in found}
    assert before == {shared_key(ec2, found[0]["instance_id"])[1]}
    cli.ok("up", "-n", "2")
    check_own_keys(cli, simulator, ec2)

    # The shared key in the user data, which every program on a node can read, impersonates no node.
    cli.write("x.py", "")
    node = found[0]
    private, _ = shared_key(ec2, node["instance_id"])
    login = subprocess.run(
        ["ssh-keygen", "-y", "-f", recorded(cli).private_key], capture_output=True, text=True, check=True
    ).stdout
    # in this simulator's network, which no other simulator of this computer uses
    address = str(ipaddress.ip_network(simulator.network)[-2])
    with socket.create_server((address, simulator.ssh_port)) as listening:
        impostor = Server(private, login, sock=listening)
        try:
            here, there = node["public_ip"].encode(), address.encode()
            faults.rewrite("DescribeInstances", lambda body: re.sub(re.escape(here) + rb"\b", there, body))
            for command in (("exec", "--", "true"), ("launch", "x.py")):
                assert "not the one recorded for this node: refused" in cli.fails(1, *command)
            assert cli("ssh", "0", "--", "true").returncode == 255  # OpenSSH's own refusal
            assert len(impostor.connections) == 3
            assert impostor.logins == []
        finally:
            impostor.close()


def test_sudo_on_process_nodes_only_replaces_host_keys(cli: Any) -> None:
    cli.nodes(1)
    for command in ("echo 'touch /x' | sudo -n sh -s", "sudo -n sh -s -- make", "sudo sh -c true"):
        assert "sudo is refused" in cli.fails(1, "exec", "--", command)

"""Host keys: each node gets one of its own, nothing else is accepted, and what was interrupted is gone on with."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest
from harness import wait_for
from hypothesis import given, settings
from hypothesis import strategies as st
from sshserver import Server, Site, site

from cloudddp import host_keys
from cloudddp.errors import CloudDDPError, ConnectError, NodeError
from cloudddp.host_keys import Known, NodeKeys
from cloudddp.ssh import keys
from cloudddp.ssh.connection import Connection
from cloudddp.ssh.fleet import Fleet
from cloudddp.state import ClusterFolder, ClusterRecord

RECORD = ClusterRecord("c-1111111111", "demo", "us-east-1", "", "ubuntu", "2026-11-20T12:00:00Z", "")
FIRST, OWN, OTHER = (
    f"ssh-ed25519 {base64.b64encode(keys.HEADER + 32 * letter).decode()}" for letter in (b"f", b"o", b"x")
)


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    made = ClusterFolder("c-1111111111", root=tmp_path)
    made.create(RECORD, private_key="PRIVATE\n", host_public=FIRST)
    made.note("made", instances=["i-0", "i-1"])
    return made


# -- what is recorded, and what it allows --------------------------------------------------------------------------


@pytest.mark.parametrize("text", [OWN, f"{OWN} root@node", f"{OWN}\n", f"  {OWN} a b c\r\n"])
def test_a_public_key_is_reduced_to_its_kind_and_its_bytes(text: str) -> None:
    assert keys.public(text) == OWN


@pytest.mark.parametrize(
    "text",
    [
        "", "\n", "ssh-ed25519", "ssh-ed25519 ", "ssh-ed25519 AAAA", "ssh-ed25519 =", OWN[:-4], OWN + "AAAA", f"{OWN}\n{OWN}",
        OWN.replace("ssh-ed25519", "ssh-rsa"), f'command="x" {OWN}', OWN + " " * 2000, "ssh-ed25519 \u00e9", OWN + "\x00",
        "ssh-ed25519 " + base64.b64encode(b"\0\0\0\x07ssh-rsa\0\0\0 " + bytes(36)).decode(),
    ],
    ids=lambda text: repr(text[:99]),
)  # fmt: skip
def test_anything_else_is_no_public_key(text: str) -> None:
    with pytest.raises(ValueError, match="ssh-ed25519"):
        keys.public(text)


@pytest.mark.parametrize(
    ("first", "made", "node", "accepted"),
    [
        (FIRST, {"i-0"}, None, (FIRST,)),
        (FIRST, set(), None, (FIRST,)),  # `up` was killed before it heard which instances AWS had made
        (FIRST, {"i-1"}, None, ()),
        ("", {"i-0"}, None, ()),
        (FIRST, {"i-0"}, NodeKeys(pending=OWN), (OWN, FIRST)),
        (FIRST, {"i-0"}, NodeKeys(current=OWN), (OWN,)),
        ("", {"i-0"}, NodeKeys(current=OWN), (OWN,)),
    ],
)
def test_the_keys_that_a_node_may_show(
    first: str, made: set[str], node: NodeKeys | None, accepted: tuple[str, ...]
) -> None:
    known = Known(first, frozenset(made), {"i-0": node} if node else {})
    assert known.accepted("i-0") == accepted


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"i-0": null}', '{"i-0": {}}', '{"i-0": {"current": 7}}', '{"i-0": {"current": "x"}}',
        json.dumps({"i-0": {"current": OWN, "pending": OTHER}}), json.dumps({"i-0": {"current": OWN + " x"}}),
        "[" * 100_000,
    ],
    ids=lambda text: repr(text[:99]),
)  # fmt: skip
def test_a_damaged_record_is_refused_never_guessed(folder: ClusterFolder, text: str) -> None:
    folder.host_keys.write_text(text)
    with pytest.raises(CloudDDPError, match=r"host_keys\.json") as caught:
        host_keys.read(folder)
    assert "cloudddp down" in caught.value.hint


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300) | st.recursive(st.none() | st.text() | st.floats() | st.sampled_from([OWN, FIRST]), lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["i-0", "current", "pending"]) | st.text(), inner)).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_only_whole_keys_are_ever_accepted(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = ClusterFolder("c-1111111111", root=tmp_path_factory.getbasetemp() / "decode")
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.host_keys.write_bytes(data)
    with contextlib.suppress(CloudDDPError):
        known = host_keys.read(folder)
        for instance in known.nodes:
            assert all(keys.public(key) == key for key in known.accepted(instance))


def test_the_instances_that_aws_answered_with_are_known_from_a_journal_that_was_cut_off(
    folder: ClusterFolder,
) -> None:
    with (folder.path / "journal.jsonl").open("a") as journal:
        journal.write(
            '{"event": "made", "instances": ["i-2", 7, null]}\n[]\nnull\n{"event": "made"}\n{"event": "ma'
        )
    assert folder.instances_made() == {"i-0", "i-1", "i-2"}
    assert ClusterFolder("c-2222222222", root=folder.path.parent.parent).instances_made() == frozenset()


def test_a_second_command_waits_until_the_first_is_done_or_dead(folder: ClusterFolder) -> None:
    code = (
        "import sys, time; from pathlib import Path; from cloudddp.state import ClusterFolder\n"
        "with ClusterFolder('c-1111111111', root=Path(sys.argv[1])).alone(lambda: None): print('in', flush=True); time.sleep(600)"
    )
    root = str(folder.path.parent.parent)
    with subprocess.Popen([sys.executable, "-c", code, root], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"in\n"
        waited = []
        with folder.alone(lambda: (waited.append(first.poll()), first.kill())):
            waited.append(first.wait())
    assert waited == [None, -9]


# -- with a real SSH server that is no honest node -----------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made


@pytest.fixture
def cluster(place: Site, tmp_path: Path) -> ClusterFolder:
    made = ClusterFolder("c-1111111111", root=tmp_path)
    made.create(RECORD, private_key="PRIVATE\n", host_public=place.host.public)
    return made


def sudo(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """What `sudo` does on the server: nothing of this computer's own may be run."""
    (folder / "bin").mkdir()
    (folder / "bin" / "sudo").write_text(f"#!/bin/sh\ncat > /dev/null\n{text}\n")
    (folder / "bin" / "sudo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")


def finish(fleet: Fleet, folder: ClusterFolder) -> None:
    host_keys.finish(fleet, folder, {0: "i-0"}, whole=True, partly=False, say=lambda _: None)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("echo", "cannot read its new host key"),
        ("echo ssh-ed25519 AAAA", "cannot read its new host key"),
        ("printf '\\377\\n'", "cannot read its new host key"),
        ("echo '$FIRST'", "is not unique"),
        ("yes ssh-ed25519 | head -c 3000000", "longer than 1 MiB"),
        ("echo 'sudo: a password is required' >&2; exit 1", "sudo: a password is required"),
    ],
)
def test_a_node_that_makes_no_key_of_its_own_is_refused_and_nothing_is_recorded(
    place: Site,
    cluster: ClusterFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    said: str,
) -> None:
    sudo(tmp_path, monkeypatch, answer.replace("$FIRST", place.host.public))
    with Fleet({0: place.target(place.server().port)}) as fleet:
        fleet.connect()
        with pytest.raises(NodeError, match=said):
            finish(fleet, cluster)
    assert host_keys.read(cluster).accepted("i-0") == (place.host.public,)


def test_a_node_that_does_not_show_the_key_it_has_made_is_refused(
    place: Site, cluster: ClusterFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sudo(tmp_path, monkeypatch, f"echo {OWN}")
    server = place.server()
    # The clock jumps past RELOAD_SECONDS after the second reconnect: the first is retried, the second is final.
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: 1e6 if len(server.connections) > 2 else 0.0)
    monkeypatch.setattr(host_keys, "time", clock)
    with Fleet({0: place.target(server.port)}) as fleet:
        fleet.connect()
        with pytest.raises(ConnectError, match="not the one recorded for this node: refused"):
            finish(fleet, cluster)
    assert host_keys.read(cluster).accepted("i-0") == (OWN, place.host.public)
    assert cluster.host_key.exists()
    assert len(server.connections) == 3
    assert len(server.logins) == 1


def test_of_two_keys_the_one_that_the_node_shows_is_known_afterwards(place: Site) -> None:
    server = place.server()
    for accepted in ((OWN, place.host.public), (place.host.public, OWN)):
        connection = Connection.open(place.target(server.port, host_keys=accepted))
        assert connection.host_key == place.host.public
        connection.close()
    with pytest.raises(ConnectError, match="refused"):
        Connection.open(place.target(server.port, host_keys=(OWN, OTHER)))
    assert len(server.logins) == 2


def test_a_node_without_a_recorded_key_is_not_talked_to(place: Site) -> None:
    server = place.server()
    with pytest.raises(ConnectError, match="no host key is recorded for it"):
        Connection.open(place.target(server.port, host_keys=()))
    assert server.connections == []


# -- whole clusters --------------------------------------------------------------------------------------------------


def recorded(cli: Any) -> ClusterFolder:
    (status,) = json.loads(cli.ok("status", "--json"))
    return ClusterFolder(status["cluster_id"], root=Path(cli.env["CLOUDDDP_HOME"]))


def members(cli: Any) -> list[dict[str, Any]]:
    return list(json.loads(cli.ok("status", "--json"))[0]["nodes"])


def shown(address: str, port: int) -> str:
    """The host key that a server shows, by plain paramiko."""
    transport = paramiko.Transport((address, port))
    try:
        transport.start_client(timeout=30)
        key = transport.get_remote_server_key()
        return f"{key.get_name()} {key.get_base64()}"
    finally:
        transport.close()


def first_key(ec2: Any, instance: str) -> tuple[str, str]:
    """The private and the public key that the user data of an instance holds, for whoever can read it."""
    answer = ec2.describe_instance_attribute(InstanceId=instance, Attribute="userData")
    text = base64.b64decode(answer["UserData"]["Value"]).decode()
    given = json.loads(text.partition("\n")[2])["ssh_keys"]
    return given["ed25519_private"], given["ed25519_public"]


def check_own_keys(cli: Any, simulator: Any, ec2: Any) -> None:
    """Every node shows a key of its own, which is the recorded one; what the user data holds is accepted nowhere."""
    found = members(cli)
    now = [shown(node["public_ip"], simulator.ssh_port) for node in found]
    assert len({*now, first_key(ec2, found[0]["instance_id"])[1]}) == len(found) + 1
    known = host_keys.read(recorded(cli))
    assert [known.accepted(node["instance_id"]) for node in found] == [(key,) for key in now]
    assert known.first == ""


def test_after_up_every_node_has_a_key_of_its_own(cli: Any, simulator: Any, ec2: Any) -> None:
    cli.ok("up", "-n", "3")
    check_own_keys(cli, simulator, ec2)


def interrupted_up(cli: Any, faults: Any, *, heard: bool) -> None:
    """Two nodes that run and have no key of their own. `heard`: `up` was told their ids before it was killed."""
    came, go = faults.hold("RunInstances")
    process = cli.start("up", "-n", "2")
    assert came.wait(60)
    if heard:
        asked, answered = faults.hold("DescribeInstances")
        go.set()
        assert asked.wait(60)
    process.kill()
    process.communicate()
    go.set()
    if heard:
        answered.set()
    wait_for(lambda: {node["state"] for node in members(cli)} == {"running"}, "the nodes run")


@pytest.mark.parametrize(
    ("heard", "verb"),
    [
        (True, ("exec", "--", "echo here")),
        (True, ("ssh", "1", "--", "echo here")),
        (False, ("up", "-n", "2")),
        (False, ("jobs",)),
    ],
)
def test_the_command_after_a_killed_up_gives_the_nodes_their_keys(
    cli: Any, simulator: Any, faults: Any, ec2: Any, heard: bool, verb: tuple[str, ...]
) -> None:
    """This is also what a cluster looks like whose `up` did not give its nodes keys of their own."""
    interrupted_up(cli, faults, heard=heard)
    before = {shown(node["public_ip"], simulator.ssh_port) for node in members(cli)}
    assert before == {first_key(ec2, members(cli)[0]["instance_id"])[1]}
    assert ("here" in cli.ok(*verb)) == ("echo here" in verb)
    check_own_keys(cli, simulator, ec2)


def test_a_node_that_did_not_answer_gets_its_key_later_and_no_rank_runs_before(
    cli: Any, simulator: Any, faults: Any, ec2: Any
) -> None:
    interrupted_up(cli, faults, heard=True)
    here = members(cli)[1]["public_ip"].encode()
    faults.rewrite("DescribeInstances", lambda body: re.sub(re.escape(here) + rb"\b", b"127.1.2.3", body))
    partly = cli("jobs")
    assert partly.returncode == 1
    assert "node 1 could not be asked" in partly.stderr
    first, second = members(cli)
    known = host_keys.read(recorded(cli))
    assert known.accepted(first["instance_id"]) == (shown(first["public_ip"], simulator.ssh_port),)
    assert known.accepted(second["instance_id"]) == (known.first,) != ("",)
    cli.write("x.py", "print('ran')")
    refused = cli("launch", "x.py")
    assert refused.returncode == 1
    assert "ran" not in refused.stdout
    faults.rewrite("DescribeInstances", lambda body: body)
    cli.ok("jobs")
    check_own_keys(cli, simulator, ec2)


def test_two_commands_at_once_finish_it_together(cli: Any, simulator: Any, faults: Any, ec2: Any) -> None:
    interrupted_up(cli, faults, heard=True)
    both = [cli.start("exec", "--", "echo here") for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=110)
        assert process.returncode == 0, err
        assert out.count("here") == 2
    check_own_keys(cli, simulator, ec2)


@pytest.mark.parametrize("stolen", ["first", "node 1"])
def test_who_has_another_key_of_the_cluster_cannot_pose_as_a_node(
    cli: Any, simulator: Any, faults: Any, ec2: Any, stolen: str
) -> None:
    cli.ok("up", "-n", "2")
    cli.write("x.py", "")
    node, other = members(cli)
    if stolen == "first":
        private = first_key(ec2, node["instance_id"])[0]
    else:
        home = Path(simulator.home) / "sim" / "nodes" / other["instance_id"]
        private = (home / "run" / "host_key").read_text()
    login = subprocess.run(
        ["ssh-keygen", "-y", "-f", recorded(cli).private_key], capture_output=True, text=True, check=True
    ).stdout
    # in the simulator's own network, which no other simulator of this computer takes
    address = str(ipaddress.ip_network(simulator.network)[-2])
    with socket.create_server((address, simulator.ssh_port)) as listening:
        impostor = Server(private, login, sock=listening)
        try:
            here, there = node["public_ip"].encode(), address.encode()
            faults.rewrite("DescribeInstances", lambda body: re.sub(re.escape(here) + rb"\b", there, body))
            for verb in (("exec", "--", "true"), ("jobs",), ("launch", "x.py")):
                done = cli(*verb)
                assert done.returncode == 1, done
                assert "not the one recorded for this node: refused" in done.stderr
            assert cli("ssh", "0", "--", "true").returncode == 255  # OpenSSH's own refusal
            assert len(impostor.connections) == 4
            assert impostor.logins == []
        finally:
            impostor.close()


def test_an_instance_that_somebody_tagged_with_the_cluster_is_refused_by_name(
    cli: Any, simulator: Any, ec2: Any
) -> None:
    cli.ok("up", "-n", "1")
    (node,) = members(cli)
    where = [{"Name": "instance-id", "Values": [node["instance_id"]]}]
    ((ours,),) = [r["Instances"] for r in ec2.describe_instances(Filters=where)["Reservations"]]
    data = ec2.describe_instance_attribute(InstanceId=node["instance_id"], Attribute="userData")
    ec2.run_instances(
        ImageId=ours["ImageId"], InstanceType=ours["InstanceType"], KeyName=ours["KeyName"], MinCount=1, MaxCount=1,
        UserData=base64.b64decode(data["UserData"]["Value"]).decode(),
        TagSpecifications=[{"ResourceType": "instance", "Tags": [t for t in ours["Tags"] if t["Key"].startswith("cloudddp:")]}],
    )  # fmt: skip
    wait_for(lambda: [n["state"] for n in members(cli)] == ["running"] * 2, "it runs")
    (strange,) = {n["instance_id"] for n in members(cli)} - {node["instance_id"]}
    done = cli("exec", "--", "true")
    assert done.returncode == 1
    assert f"({strange}): no host key is recorded for it, so it cannot prove itself: refused" in done.stderr
    assert "this cluster's `up` did not start it" in done.stderr


def test_a_reboot_keeps_the_key(cli: Any, simulator: Any, ec2: Any) -> None:
    cli.ok("up", "-n", "1")
    (node,) = members(cli)
    before = shown(node["public_ip"], simulator.ssh_port)
    ec2.stop_instances(InstanceIds=[node["instance_id"]])
    wait_for(lambda: members(cli)[0]["state"] == "stopped", "it has stopped")
    ec2.start_instances(InstanceIds=[node["instance_id"]])
    wait_for(lambda: members(cli)[0]["state"] == "running", "it runs again")
    assert shown(members(cli)[0]["public_ip"], simulator.ssh_port) == before
    cli.ok("exec", "--", "true")


def test_sudo_on_a_node_that_shares_this_computer_does_nothing_else(cli: Any) -> None:
    cli.ok("up", "-n", "1")
    for command in (
        "sudo -n true",
        "echo 'touch /x' | sudo -n sh -s",
        "sudo -n sh -s -- make",
        "sudo sh -c true",
    ):
        done = cli("exec", "--", command)
        assert done.returncode == 1
        assert "sudo is refused" in done.stderr

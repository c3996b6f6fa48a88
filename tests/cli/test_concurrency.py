"""Concurrent commands: two `up`s create one cluster, `down` during `up` leaves nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.harness import TIMEOUT, CommandLine, wait_for
from support.interrupts import interrupted_at_call
from support.networks import open_to_the_internet
from support.terminal import Terminal

# The two commands run on one computer or on two.
COMPUTERS = ["one", "two"]


@pytest.fixture
def other(cli: CommandLine, tmp_path: Path) -> CommandLine:
    """The same user's second computer: another state folder, the same account."""
    return CommandLine(
        cli.cwd, cli.cluster, {**cli.env, "CLOUDDDP_HOME": str(tmp_path / "second")}, cli.started
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=TIMEOUT)
    return process.returncode, out, err


def cluster_ids(ec2: Any, name: str) -> set[str]:
    """The cluster ids of all resources of that name, except terminated instances."""
    where = [{"Name": "tag:cloudddp:cluster", "Values": [name]}]
    found = [
        *(
            i
            for r in ec2.describe_instances(Filters=where)["Reservations"]
            for i in r["Instances"]
            if i["State"]["Name"] != "terminated"
        ),
        *ec2.describe_security_groups(Filters=where)["SecurityGroups"],
        *ec2.describe_key_pairs(Filters=where)["KeyPairs"],
    ]
    return {tag["Value"] for one in found for tag in one["Tags"] if tag["Key"] == "cloudddp:cluster-id"}


def names_the_holder(text: str, cluster_id: str) -> bool:
    """Whether the second `up` names the owner of the name, in its error or in its report on the existing
    cluster."""
    taken = f"cluster {cluster_id} of user/moto, since 20" in text
    return taken or re.search(r"is already up, created by user/moto on 20\d\d-", text) is not None


# -- two `up`s -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("computers", COMPUTERS)
def test_two_ups_create_one_cluster(
    cli: CommandLine, other: CommandLine, ec2: Any, remains: Any, computers: str
) -> None:
    first = cli.start("up", "-y", "-n", "2")
    second = (cli if computers == "one" else other).start("up", "-y", "-n", "2")
    ends = [finish(first), finish(second)]
    assert all(code in (0, 1) for code, _, _ in ends), ends
    assert any(code == 0 and "is ready" in out for code, out, _ in ends), ends
    (cluster_id,) = cluster_ids(ec2, cli.cluster)
    found = remains()
    assert len(found.instances) == 2
    assert (len(found.groups), len(found.keys)) == (1, 1)
    late = [out + err for _, out, err in ends if "is ready" not in out]
    assert len(late) == 1
    assert names_the_holder(late[0], cluster_id), late[0]
    kept = [p.parent.name for p in Path(cli.env["CLOUDDDP_HOME"]).glob("clusters/*/id_ed25519")]
    kept += [p.parent.name for p in Path(other.env["CLOUDDDP_HOME"]).glob("clusters/*/id_ed25519")]
    assert kept.count(cluster_id) == 1


def test_up_confirmed_after_another_up_creates_nothing(
    cli: CommandLine, other: CommandLine, ec2: Any, remains: Any
) -> None:
    """In another VPC, where the name of a security group would be free."""
    vpc = ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.77.0.0/20", AvailabilityZone="us-east-1a")
    gateway = open_to_the_internet(ec2, vpc)
    del cli.env["CLOUDDDP_YES"]
    waiting = Terminal(cli, "up", "-n", "1", "--subnets", subnet["Subnet"]["SubnetId"])
    try:
        waiting.read_until(b"Start these nodes? [y/N]")
        other.ok("up", "-y", "-n", "1")
        before = remains()
        (cluster_id,) = cluster_ids(ec2, cli.cluster)
        os.write(waiting.ours, b"y\n")
        with contextlib.suppress(OSError):  # the terminal closes with the command
            waiting.read_until(b"-> ")
        assert waiting.process.wait(TIMEOUT) == 1
    finally:
        waiting.process.kill()
        waiting.process.wait()
        ec2.detach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
        ec2.delete_internet_gateway(InternetGatewayId=gateway)
        ec2.delete_subnet(SubnetId=subnet["Subnet"]["SubnetId"])
        ec2.delete_vpc(VpcId=vpc)
    output = " ".join(waiting.seen.decode().split())
    assert names_the_holder(output, cluster_id), output
    assert "nothing was created" in output
    assert remains() == before
    other.ok("down", "-y")


# -- killed commands, and `down` ----------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["ImportKeyPair", "CreateSecurityGroup", "RunInstances"])
def test_up_after_killed_up_creates_one_cluster(
    cli: CommandLine, faults: Any, ec2: Any, remains: Any, action: str
) -> None:
    interrupted_at_call(cli, faults, action, "up", "-y", "-n", "2", number=signal.SIGKILL)
    assert remains().keys
    cli.ok("up", "-y", "-n", "2")
    found = remains()
    assert len(found.instances) == 2
    assert (len(found.groups), len(found.keys)) == (1, 1)
    assert len(cluster_ids(ec2, cli.cluster)) == 1


def test_name_held_by_another_computer_is_not_taken_over(
    cli: CommandLine, other: CommandLine, faults: Any, ec2: Any, remains: Any
) -> None:
    """Whether the `up` of another computer was killed or still runs cannot be known."""
    interrupted_at_call(cli, faults, "CreateSecurityGroup", "up", "-y", "-n", "1", number=signal.SIGKILL)
    (cluster_id,) = cluster_ids(ec2, cli.cluster)
    err = other.fails(1, "up", "-y", "-n", "1")
    assert "another computer of yours created it, or is still in `cloudddp up`" in err
    assert names_the_holder(err, cluster_id), err
    assert "cloudddp down" in err
    assert not remains().instances
    other.ok("down", "-y")
    assert remains().nothing
    assert "is ready" in other.ok("up", "-y", "-n", "1")
    other.ok("down", "-y")


@pytest.mark.parametrize("computers", COMPUTERS)
def test_name_is_free_after_the_deadline(
    cli: CommandLine, other: CommandLine, ec2: Any, remains: Any, computers: str
) -> None:
    (cli if computers == "one" else other).ok("up", "-y", "-n", "1")
    before = cluster_ids(ec2, cli.cluster)
    ec2.terminate_instances(InstanceIds=remains().instances)
    wait_for(lambda: not remains().instances, "the node has ended")
    if computers == "two":  # here only the tag shows that it is no longer in use
        assert cli("up", "-y", "-n", "1").returncode == 1
        (key,) = ec2.describe_key_pairs(KeyNames=[f"cloudddp-{cli.cluster}"])["KeyPairs"]
        past = [{"Key": "cloudddp:expires", "Value": "2026-01-01T00:00:00Z"}]
        ec2.create_tags(Resources=[key["KeyPairId"]], Tags=past)
    assert "is ready" in cli.ok("up", "-y", "-n", "1")
    assert not cluster_ids(ec2, cli.cluster) & before


def test_foreign_key_pair_is_named_and_kept(cli: CommandLine, ec2: Any) -> None:
    created = ec2.create_key_pair(KeyName=f"cloudddp-{cli.cluster}")["KeyPairId"]
    try:
        assert f"is taken in us-east-1 by key pair {created}" in cli.fails(1, "up", "-y", "-n", "1")
        assert ec2.describe_key_pairs(KeyNames=[f"cloudddp-{cli.cluster}"])["KeyPairs"]
    finally:
        ec2.delete_key_pair(KeyPairId=created)


def test_lost_answer_of_the_name_lock(cli: CommandLine, faults: Any, remains: Any) -> None:
    """botocore repeats the call: a Duplicate, whose tag is this cluster's id."""
    faults.lose_answer("ImportKeyPair")
    assert "is ready" in cli.ok("up", "-y", "-n", "1")
    assert faults.count("ImportKeyPair") == 2
    assert len(remains().keys) == 1


# -- `up` with `down` ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "action",
    [
        *("ImportKeyPair", "CreateSecurityGroup", "AuthorizeSecurityGroupIngress"),
        *("AuthorizeSecurityGroupEgress", "RunInstances"),
    ],
)
def test_down_between_two_calls_of_up_leaves_nothing(
    cli: CommandLine, other: CommandLine, faults: Any, remains: Any, action: str
) -> None:
    """`up` is held after the call has had its effect; meanwhile `down` runs from start to end."""
    other.env["AWS_ENDPOINT_URL"] = faults.upstream
    reached, release = faults.hold(action)
    up = cli.start("up", "-y", "-n", "2")
    assert reached.wait(60)
    report = other.ok("down", "-y")
    release.set()
    code, _, error = finish(up)
    assert code == 1, error
    assert "removed by another command while it was being created; nothing of it is left" in error
    assert "nothing is left" in report or "nothing to do" in report
    assert remains().nothing

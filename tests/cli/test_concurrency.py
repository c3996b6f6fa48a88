"""Concurrent commands: two `up`s create one cluster, `down` during `up` leaves nothing."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from support.harness import TIMEOUT, CommandLine, finished
from support.interrupts import interrupted_at_call


@pytest.fixture
def other(cli: CommandLine, tmp_path: Path) -> CommandLine:
    """The same user's second computer: another state folder, the same account."""
    return CommandLine(
        cli.cwd, cli.cluster, {**cli.env, "CLOUDDDP_HOME": str(tmp_path / "second")}, cli.started
    )


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


def test_two_ups_create_one_cluster(cli: CommandLine, other: CommandLine, ec2: Any, remains: Any) -> None:
    ups = [one.start("up", "-y", "-n", "2") for one in (cli, other)]
    ends = [process.communicate(timeout=TIMEOUT) for process in ups]
    codes = [process.returncode for process in ups]
    assert set(codes) <= {0, 1}, ends
    (late,) = [
        out + err for code, (out, err) in zip(codes, ends, strict=True) if code or "is ready" not in out
    ]
    (cluster_id,) = cluster_ids(ec2, cli.cluster)
    found = remains()
    assert (len(found.instances), len(found.groups), len(found.keys)) == (2, 1, 1)
    assert names_the_holder(late, cluster_id), late
    homes = [Path(one.env["CLOUDDDP_HOME"]) for one in (cli, other)]
    kept = [path.parent.name for home in homes for path in home.glob("clusters/*/id_ed25519")]
    assert kept.count(cluster_id) == 1


def test_name_of_a_killed_up_is_held_on_other_computers_and_used_again_on_its_own(
    cli: CommandLine, other: CommandLine, faults: Any, ec2: Any, remains: Any
) -> None:
    """Whether the `up` of another computer was killed or still runs cannot be known."""
    interrupted_at_call(cli, faults, "CreateSecurityGroup", "up", "-y", "-n", "2", number=signal.SIGKILL)
    (cluster_id,) = cluster_ids(ec2, cli.cluster)
    err = other.fails(1, "up", "-y", "-n", "2")
    assert "another computer of yours created it, or is still in `cloudddp up`" in err
    assert names_the_holder(err, cluster_id), err
    assert "cloudddp down" in err
    assert not remains().instances
    cli.ok("up", "-y", "-n", "2")
    found = remains()
    assert (len(found.instances), len(found.groups), len(found.keys)) == (2, 1, 1)
    assert len(cluster_ids(ec2, cli.cluster)) == 1
    other.ok("down", "-y")
    assert remains().nothing


def test_key_pair_holds_the_name_until_its_deadline(cli: CommandLine, ec2: Any, remains: Any) -> None:
    """And one that is not of cloudddp for ever."""
    name = f"cloudddp-{cli.cluster}"
    foreign = ec2.create_key_pair(KeyName=name)["KeyPairId"]
    assert f"is taken in us-east-1 by key pair {foreign}" in cli.fails(1, "up", "-y", "-n", "1")
    assert ec2.describe_key_pairs(KeyNames=[name])["KeyPairs"]
    ec2.delete_key_pair(KeyPairId=foreign)
    tags = {"cluster": cli.cluster, "cluster-id": "c-0123456789", "owner": "user/moto"}
    pairs = [{"Key": f"cloudddp:{key}", "Value": value} for key, value in tags.items()]
    of_another = ec2.create_key_pair(
        KeyName=name, TagSpecifications=[{"ResourceType": "key-pair", "Tags": pairs}]
    )["KeyPairId"]
    expires = {"Key": "cloudddp:expires", "Value": "2199-01-01T00:00:00Z"}
    ec2.create_tags(Resources=[of_another], Tags=[expires])
    assert "cluster c-0123456789 of user/moto" in cli.fails(1, "up", "-y", "-n", "1")
    ec2.create_tags(Resources=[of_another], Tags=[{**expires, "Value": "2026-01-01T00:00:00Z"}])
    assert "is ready" in cli.ok("up", "-y", "-n", "1")
    assert len(remains().keys) == 1
    assert cluster_ids(ec2, cli.cluster) != {"c-0123456789"}


@pytest.mark.parametrize("action", ["ImportKeyPair", "RunInstances"])
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
    _, error = finished(up, 1)
    assert "removed by another command while it was being created; nothing of it is left" in error
    assert "nothing is left" in report or "nothing to do" in report
    assert remains().nothing

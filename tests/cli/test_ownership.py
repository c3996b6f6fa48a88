"""Ownership: commands by name do not change what other users of the same account created."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.harness import CommandLine
from support.tagged import CLUSTER_ID, tagged_instance

ALICE = "user/alice"
COMMANDS = [
    ("down", "-y"),
    ("launch", "ok.py"),
    ("pull",),
    ("exec", "true"),
    ("logs",),
]


def test_cluster_of_another_owner_is_refused_without_anyone(cli: CommandLine, ec2: Any, remains: Any) -> None:
    """It is shown, refused, and used with --anyone."""
    tagged_instance(ec2, cli.cluster, owner=ALICE)
    tags = {"cloudddp:cluster": cli.cluster, "cloudddp:cluster-id": CLUSTER_ID, "cloudddp:owner": ALICE}
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    group = ec2.create_security_group(
        GroupName=cli.cluster,
        Description="-",
        TagSpecifications=[{"ResourceType": "security-group", "Tags": pairs}],
    )["GroupId"]
    cli.write("ok.py", "")
    assert ALICE in cli.ok("ls")
    shown = cli.ok("status")
    assert ALICE in shown
    assert "not yours; you are user/moto" in shown

    before = remains()
    rules = ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"]
    for words in COMMANDS:
        err = cli.fails(1, *words)
        assert "is not yours" in err
        assert ALICE in err
        assert "you are user/moto" in err
        assert "--anyone" in err
    taken = cli.fails(1, "up", "-n", "1")
    assert f"of {ALICE}, since 20" in taken
    assert "nothing was created" in taken
    assert "-c" in taken
    assert remains() == before
    assert ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"] == rules

    # the key is on the other computer
    assert "no key for cluster" in cli.fails(1, "exec", "--anyone", "true")
    assert "is allowed from" in cli.ok("allow-me", "--anyone")
    assert "1 node terminated" in cli.ok("down", "-y", "--anyone")
    assert remains().nothing


def test_only_own_resources_are_removed(
    cli: CommandLine, faults: Any, tmp_path: Path, ec2: Any, remains: Any
) -> None:
    """With an unknown identity those that this computer has a record of. A copied tag deletes no login key,
    and `down` names an instance of the same cluster name and keeps it."""
    cli.ok("up", "-n", "1")
    faults.fail("GetCallerIdentity", "ServiceUnavailable", times=99, status=503)
    second = cli.fails(1, "down", "-y", CLOUDDDP_HOME=str(tmp_path / "second"))
    assert "your AWS identity is unknown" in second
    assert "--anyone" in second
    assert remains().instances
    faults.clear()
    (cluster,) = json.loads(cli.ok("status", "--json"))
    stray = f"stray-{cli.cluster}"
    tags = {
        "cloudddp:cluster": stray,
        "cloudddp:cluster-id": cluster["cluster_id"],
        "cloudddp:owner": "user/mallory",
    }
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    for words in (("down", "-y"), ("down", "-y", "--anyone")):
        ec2.create_key_pair(KeyName=stray, TagSpecifications=[{"ResourceType": "key-pair", "Tags": pairs}])
        cli("-c", stray, "--region", "us-east-1", *words)
        ec2.delete_key_pair(KeyName=stray)
    assert "still here" in cli.ok("exec", "--", "echo still here")
    hers = tagged_instance(ec2, cli.cluster, owner="user/mallory")
    faults.fail("GetCallerIdentity", "ServiceUnavailable", times=99, status=503)
    done = cli.exits(0, "down", "-y")
    assert "1 node terminated" in done.stdout
    assert "not removed, because it is not yours" in done.stderr
    assert hers in done.stderr
    assert "user/mallory" in done.stderr
    assert remains().instances == [hers]
    ec2.terminate_instances(InstanceIds=[hers])


def test_key_pair_without_cluster_is_released_on_request(cli: CommandLine, ec2: Any) -> None:
    name = f"cloudddp-{cli.cluster}"
    ec2.create_key_pair(KeyName=name)
    here = ("--region", "us-east-1", "down", "-y")
    assert "is reserved by key pair key-" in cli.fails(1, *here)
    cli.ok(*here, "--anyone")
    assert ec2.describe_key_pairs(Filters=[{"Name": "key-name", "Values": [name]}])["KeyPairs"] == []

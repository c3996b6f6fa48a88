"""Ownership: commands by name do not change what other users of the same account created."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from support.harness import CommandLine


@pytest.fixture
def alice(simulator: Any, ec2: Any, cli: CommandLine, tmp_path: Path) -> Iterator[CommandLine]:
    """Another IAM user of the account, on another computer, who uses the same cluster name."""
    iam = boto3.client(
        "iam",
        endpoint_url=simulator.endpoint,
        region_name=simulator.region,
        aws_access_key_id="x",
        aws_secret_access_key="x",
    )
    name = f"alice-{cli.cluster}"
    iam.create_user(UserName=name)
    key = iam.create_access_key(UserName=name)["AccessKey"]
    own = {
        "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
        "CLOUDDDP_HOME": str(tmp_path / "alice"),
    }
    line = CommandLine(cli.cwd, cli.cluster, {**cli.env, **own}, cli.started)
    yield line
    line.remove(ec2, AWS_ENDPOINT_URL=simulator.endpoint)


def owner(line: CommandLine) -> str:
    return f"user/alice-{line.cluster}"


COMMANDS = [
    ("down", "-y"),
    ("allow-me",),
    ("launch", "ok.py"),
    ("sync",),
    ("pull",),
    ("exec", "true"),
    ("ssh",),
    ("logs",),
    ("jobs",),
    ("cancel",),
]


def test_commands_refuse_another_owners_cluster(
    cli: CommandLine, alice: CommandLine, ec2: Any, remains: Any
) -> None:
    alice.ok("up", "-n", "1")
    cli.write("ok.py", "")
    (group,) = remains().groups
    rules = ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"]
    before = remains()
    for words in COMMANDS:
        done = cli(*words)
        assert done.returncode == 1, (words, done)
        assert "is not yours" in done.stderr
        assert owner(alice) in done.stderr
        assert "you are user/moto" in done.stderr
        assert "--anyone" in done.stderr
    assert remains() == before
    assert ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"] == rules


def test_anyone_option(cli: CommandLine, alice: CommandLine, remains: Any) -> None:
    alice.ok("up", "-n", "1")
    cli.write("ok.py", "")
    for words in COMMANDS[2:]:  # allowed, but the key is on the other computer
        done = cli(words[0], "--anyone", *words[1:])
        assert done.returncode == 1, (words, done)
        assert "no key for cluster" in done.stderr, words
    assert "is allowed from" in cli.ok("allow-me", "--anyone")
    assert "1 node terminated" in cli.ok("down", "-y", "--anyone")
    assert remains().nothing


def test_ls_and_status_show_the_owner(cli: CommandLine, alice: CommandLine) -> None:
    alice.ok("up", "-n", "1")
    assert owner(alice) in cli.ok("ls")
    shown = cli.ok("status")
    assert owner(alice) in shown
    assert "not yours; you are user/moto" in shown
    assert "not yours" not in alice.ok("status")


def test_up_names_the_owner_of_a_taken_name(cli: CommandLine, alice: CommandLine, remains: Any) -> None:
    alice.ok("up", "-n", "1")
    before = remains()
    done = cli("up", "-n", "1")
    assert done.returncode == 1
    assert f"of {owner(alice)}, since 20" in done.stderr
    assert "nothing was created" in done.stderr
    assert "-c" in done.stderr
    assert remains() == before


@pytest.mark.parametrize("tag", ["cloudddp:owner", "cloudddp:cluster-id"])
def test_own_cluster_with_changed_tags_is_removed(
    cli: CommandLine, faults: Any, ec2: Any, remains: Any, tag: str
) -> None:
    cli.ok("up", "-n", "1")
    ec2.create_tags(Resources=remains().instances, Tags=[{"Key": tag, "Value": "user/mallory"}])
    assert "1 node terminated" in cli.ok("down", "-y")
    assert remains().nothing


def test_journal_avoids_the_identity_call(cli: CommandLine, faults: Any) -> None:
    cli.ok("up", "-n", "1")
    faults.calls.clear()
    cli.ok("status")
    assert faults.calls == ["DescribeInstances"]
    cli.ok("exec", "true")
    cli.ok("down", "-y")
    assert "GetCallerIdentity" not in faults.calls


def test_same_user_on_another_computer_may_remove_it(cli: CommandLine, tmp_path: Path, remains: Any) -> None:
    cli.ok("up", "-n", "1")
    assert "1 node terminated" in cli.ok("down", "-y", CLOUDDDP_HOME=str(tmp_path / "second"))
    assert remains().nothing


def test_unknown_identity_removes_only_own_clusters(
    cli: CommandLine, alice: CommandLine, faults: Any, tmp_path: Path, remains: Any
) -> None:
    cli.ok("up", "-n", "1")
    faults.fail("GetCallerIdentity", "ServiceUnavailable", times=99, status=503)
    second = cli("down", "-y", CLOUDDDP_HOME=str(tmp_path / "second"))
    assert second.returncode == 1
    assert "your AWS identity is unknown" in second.stderr
    assert "--anyone" in second.stderr
    assert remains().instances
    cli.ok("down", "-y")
    assert remains().nothing


def test_down_names_clusters_of_others(cli: CommandLine, alice: CommandLine, ec2: Any, remains: Any) -> None:
    """Two clusters of one name, as an earlier version without name lock could create them."""
    alice.ok("up", "-n", "1")
    (hers,) = remains().instances
    (key,) = ec2.describe_key_pairs(Filters=[{"Name": "key-name", "Values": [f"cloudddp-{cli.cluster}"]}])[
        "KeyPairs"
    ]
    ec2.delete_tags(Resources=[hers], Tags=[{"Key": "cloudddp:cluster"}])
    ec2.delete_key_pair(KeyPairId=key["KeyPairId"])
    cli.ok("up", "-n", "1")
    ec2.create_tags(Resources=[hers], Tags=[{"Key": "cloudddp:cluster", "Value": cli.cluster}])
    cli.ok("exec", "true")
    done = cli("down", "-y")
    assert done.returncode == 0, done.stderr
    assert "1 node terminated" in done.stdout
    assert "not removed, because it is not yours" in done.stderr
    assert hers in done.stderr
    assert owner(alice) in done.stderr
    assert remains().instances == [hers]


GENERATED: list[tuple[str, str]] = [
    ("assumed-role/Dev/botocore-session-1700000000", "assumed-role/Dev"),
    ("assumed-role/Dev/alice@example.org", "assumed-role/Dev/alice@example.org"),
    ("user/alice", "user/alice"),
    ("root", "root"),
]


@pytest.mark.parametrize(("arn", "owner"), GENERATED)
def test_generated_session_name_is_not_part_of_the_owner(
    cli: CommandLine, faults: Any, ec2: Any, remains: Any, arn: str, owner: str
) -> None:
    change: Callable[[bytes], bytes] = lambda body: body.replace(b":user/moto", f":{arn}".encode())  # noqa: E731
    faults.rewrite("GetCallerIdentity", change)
    cli.env["AWS_ENDPOINT_URL"] = faults.url
    cli.ok("up", "-n", "1")
    (shown,) = json.loads(cli.ok("status", "--json"))
    assert shown["owner"] == owner


@pytest.mark.parametrize("words", [("down", "-y"), ("down", "-y", "--anyone")])
def test_copied_tag_deletes_no_login_key(cli: CommandLine, ec2: Any, words: tuple[str, ...]) -> None:
    cli.ok("up", "-n", "1")
    (cluster,) = json.loads(cli.ok("status", "--json"))
    stray = f"stray-{cli.cluster}"
    tags = {
        "cloudddp:cluster": stray,
        "cloudddp:cluster-id": cluster["cluster_id"],
        "cloudddp:owner": "user/mallory",
    }
    ec2.create_key_pair(
        KeyName=stray,
        TagSpecifications=[
            {
                "ResourceType": "key-pair",
                "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
            }
        ],
    )
    cli("-c", stray, *words)
    assert "still here" in cli.ok("exec", "--", "echo still here")
    ec2.delete_key_pair(KeyName=stray)


def test_key_pair_without_cluster_is_released_on_request(cli: CommandLine, ec2: Any) -> None:
    ec2.create_key_pair(KeyName=f"cloudddp-{cli.cluster}")
    refused = cli("down", "-y")
    assert refused.returncode == 1
    assert "is reserved by key pair key-" in refused.stderr
    cli.ok("down", "-y", "--anyone")
    cli.ok("up", "-n", "1")

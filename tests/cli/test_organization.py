"""Rules of an account and its organization: KMS keys, instance profiles, and launches that a policy
denies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import organization
from support.harness import TIMEOUT, CommandLine, clean_environment, remaining, running_instances
from support.simlab import client_of

from cloudddp.simulator import control

KMS_ACTIONS = ("kms:CreateGrant", "kms:Decrypt", "kms:DescribeKey", "kms:GenerateDataKeyWithoutPlaintext")


# -- KMS keys ------------------------------------------------------------------------------------------------


@pytest.fixture
def key(simulator: Any) -> str:
    return str(client_of(simulator, "kms").create_key()["KeyMetadata"]["Arn"])


def test_unusable_key_is_named_with_the_permissions_it_needs(
    cli: Any, simulator: Any, key: str, remains: Any
) -> None:
    client_of(simulator, "kms").disable_key(KeyId=key.rpartition("/")[2])
    err = cli.fails(1, "up", "-n", "2", "--kms-key", key)
    assert "2 of 2 nodes ended while starting: i-" in err
    assert "Client.InvalidKMSKey.InvalidState: The KMS key provided is in an incorrect state" in err
    assert f"EC2 could not use KMS key {key}" in err
    assert all(action in err for action in KMS_ACTIONS)
    assert remains().nothing


def test_doctor_checks_the_key(cli: Any, simulator: Any, key: str) -> None:
    def check(name: str, code: int) -> dict[str, str]:
        done = cli.exits(code, "doctor", "--json", "--kms-key", name)
        (found,) = (one for one in json.loads(done.stdout) if one["name"] == "KMS key")
        return found

    assert check(key, 0)["status"] == "pass"
    unknown = check("alias/nobody", 1)
    assert (unknown["status"], "alias/nobody" in unknown["detail"]) == ("fail", True)
    assert all(action in unknown["fix"] for action in KMS_ACTIONS)
    client_of(simulator, "kms").disable_key(KeyId=key.rpartition("/")[2])
    assert "it is Disabled" in check(key, 1)["detail"]


def test_key_that_may_not_be_described_is_not_checked(user: CommandLine) -> None:
    """`up` does not need kms:DescribeKey outside EC2, so the lack of it is no failure."""
    out = user.ok("doctor", "--json", "--kms-key", "alias/train", "--tag", "CostCenter=42")
    (found,) = (one for one in json.loads(out) if one["name"] == "KMS key")
    assert found["status"] == "note"
    assert "alias/train is not checked: AWS denied kms:DescribeKey" in found["detail"]


# -- instance profiles ---------------------------------------------------------------------------------------


def test_unknown_instance_profile_leaves_nothing(cli: Any, remains: Any) -> None:
    err = cli.fails(1, "up", "--instance-profile", "nobody")
    assert "nobody" in err
    assert "Invalid IAM Instance Profile name" in err
    assert remains().nothing


# -- an organization -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    """An account in an organization that demands tags and encryption, and denies types and regions.

    Its user may not pass every role, nor decode messages.
    """
    home = tmp_path_factory.mktemp("organization")
    allowed = ["ec2:*", "ssm:*", "sts:GetCallerIdentity"]
    user = [
        {"Effect": "Allow", "Action": allowed, "Resource": "*"},
        {"Effect": "Allow", "Action": "iam:PassRole", "Resource": "arn:aws:iam::*:role/train"},
    ]
    path = home / "user.json"
    path.write_text(json.dumps({"Version": "2012-10-17", "Statement": user}))
    policies = {"policy": path, "scp": organization.write(home)}
    yield control.start(home, nodes="process", policies=policies, timeout=TIMEOUT)
    control.stop(home)


@pytest.fixture
def user(limited: control.Simulator, project: Path) -> Iterator[CommandLine]:
    env = clean_environment(
        CLOUDDDP_HOME=str(limited.home),
        CLOUDDDP_YES="1",
        CLOUDDDP_CLUSTER="organization",
        **control.environment(limited),
    )
    line = CommandLine(project, "organization", env)
    yield line
    line.end()
    assert line.remove(client_of(limited, "ec2")) == 0


def nothing_left(limited: control.Simulator) -> bool:
    return remaining(client_of(limited, "ec2"), "organization").nothing


def refused(user: CommandLine, *words: str) -> str:
    return user.fails(1, "up", "-n", "1", *words)


TAGGED = ("--tag", "CostCenter=42")
NEXT = ("--tag K=V", "--kms-key", "--region", "docs/organizations.md", "ask its administrators")
ROLE = "ask for iam:PassRole on the role of instance profile administrator"


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        ((), ("ec2:RunInstances", "explicit deny in a service control policy", *NEXT)),  # lacks a tag
        (
            ("-t", "p5.48xlarge", *TAGGED),
            ("AWS denied ec2:RunInstances on arn:aws:ec2:us-east-1:123456789012:instance/*",),
        ),
        (("--instance-profile", "administrator", *TAGGED), (ROLE,)),
    ],
)
def test_what_the_organization_denies_is_reported_before_anything_is_created(
    limited: control.Simulator, user: CommandLine, flags: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    message = refused(user, *flags)
    assert [text for text in texts if text not in message] == []
    assert "failure message" not in message
    assert "creating the key pair" not in message
    assert nothing_left(limited)
    if ROLE in texts:
        assert ROLE in user("doctor", *flags).stdout


def test_denied_region_is_left_out_where_another_one_is_given(
    limited: control.Simulator, user: CommandLine
) -> None:
    flags = ("--regions", "us-west-2,us-east-1", "--price", "1", "--tag", "CostCenter=42")
    err = user.messages("up", "-n", "1", *flags)
    assert "us-west-2 is left out: AWS denied ec2:DescribeInstances in us-west-2" in err
    assert len(running_instances(client_of(limited, "ec2"), "organization")) == 1
    user.ok("down", "-y")
    refusal = refused(user, "--regions", "us-west-2,eu-west-1", "--price", "1", "--tag", "CostCenter=42")
    assert "AWS denied ec2:DescribeInstances in us-west-2: explicit deny in a service control" in refusal
    assert "creating the key pair" not in refusal


def test_denied_region_where_this_computer_has_a_cluster_is_not_left_out(
    cli: CommandLine, faults: Any, remains: Any
) -> None:
    cli.ok("up", "-n", "1")
    faults.fail("DescribeInstances@us-east-1", "UnauthorizedOperation", status=403)
    err = cli.fails(1, "up", "-n", "1", "--regions", "us-east-1,us-west-2", CLOUDDDP_PRICE="1")
    assert "AWS denied ec2:DescribeInstances in us-east-1" in err
    assert len(remains().instances) == 1


def test_key_that_the_user_may_not_use(limited: control.Simulator, user: CommandLine) -> None:
    key = client_of(limited, "kms").create_key()["KeyMetadata"]["Arn"]
    message = refused(user, "--kms-key", key, "--tag", "CostCenter=42")
    assert f"EC2 could not use KMS key {key}" in message
    assert all(action in message for action in KMS_ACTIONS)
    assert nothing_left(limited)

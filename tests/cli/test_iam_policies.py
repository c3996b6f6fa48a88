"""infra/iam: AWS would accept the policies, and they keep users away from what is not a cluster's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from support.account import refused
from support.harness import CommandLine, clean_environment, remaining
from support.permissions import FOLDER, KEY, TAG, listed, operations, statements
from support.simlab import client_of

from cloudddp.simulator import control
from cloudddp.simulator.iam import documents
from cloudddp.simulator.iam.ec2 import authorization
from cloudddp.simulator.iam.evaluate import Check, evaluate

_ALWAYS = ("aws:RequestedRegion", "aws:PrincipalArn", "ec2:Region")


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    """A simulator whose user has the policy of operators."""
    home = tmp_path_factory.mktemp("operator")
    yield control.start(home, nodes="process", policies={"policy": FOLDER / "operator.json"})
    control.stop(home)


def own_client(sim: control.Simulator, service: str) -> Any:
    """A client with the key that the policy limits."""
    keys = {"aws_access_key_id": KEY, "aws_secret_access_key": "any"}
    return boto3.client(service, endpoint_url=sim.endpoint, region_name=sim.region, **keys)


# -- the policies as documents -------------------------------------------------------------------------------


# Permissions whose name is that of no call, with the condition keys that they support here.
OTHER_NAMES = {"s3:ListBucket": ["s3:prefix"]}  # for ListObjectsV2


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.json")))
def test_policy_is_valid(name: str) -> None:
    """Its size, which IAM limits, too. Service Authorization Reference: a condition key that an action lacks
    for a resource type is never true."""
    documents.parse((FOLDER / name).read_text())
    sids = [item["Sid"] for item in statements(name)]
    assert len(set(sids)) == len(sids)
    for item in statements(name):
        kinds = {arn.split(":", 5)[-1].partition("/")[0] for arn in listed(item["Resource"])}
        keys = [key for block in item.get("Condition", {}).values() for key in block if key not in _ALWAYS]
        for action in listed(item["Action"]):
            if keys == OTHER_NAMES.get(action):
                continue
            assert action in operations(action.partition(":")[0]), f"{item['Sid']}: {action}"
            assert unsupported(action, kinds, keys) == [], f"{name}, {item['Sid']}, {action}"


def unsupported(action: str, kinds: set[str], keys: list[str]) -> list[str]:
    """Return what an action of EC2 does not support: resource types (`*` is any), and condition keys on
    them."""
    prefix, _, operation = action.partition(":")
    if prefix != "ec2":
        return keys
    if operation == "CreateTags":  # on every type, with every key about tags
        return [key for key in keys if not key.startswith(("aws:Re", "aws:TagKeys", "ec2:CreateAction"))]
    known = authorization().get(operation, {})
    required = {kind for kind, facts in known.items() if facts["required"]} or set(known)
    own = required if kinds == {"*"} else kinds & set(known)
    if not known or not own:
        return sorted(kinds - {"*"}) + keys
    wanted = [f"{key.partition('/')[0]}/" if "/" in key else key for key in keys]
    return [f"{key} on {kind}" for kind in own for key in wanted if key not in known[kind]["keys"]]


def test_unsupported_conditions_are_found() -> None:
    assert unsupported("ec2:RunInstances", {"volume"}, ["ec2:Encrypted"]) == []
    assert unsupported("ec2:RunInstances", {"instance"}, ["ec2:Encrypted"]) == ["ec2:Encrypted on instance"]
    assert unsupported("ec2:RunInstances", {"image"}, ["aws:RequestTag/a"]) == ["aws:RequestTag/ on image"]
    assert unsupported("ec2:DescribeInstances", {"instance"}, ["aws:a"]) == ["instance", "aws:a"]
    assert unsupported("ec2:DeleteVolume", {"instance"}, []) == ["instance"]


def further_restrictions() -> list[tuple[str, dict[str, Any]]]:
    """Return statement and condition of each row of "Restrict further" in the README."""
    rows = re.findall(r"^\| [^|]+ \| (\w+) \| `(.+)` \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    return [(sid, json.loads(f"{{{condition}}}")) for sid, condition in rows]


def test_conditions_of_the_readme_are_supported() -> None:
    found = further_restrictions()
    assert len(found) == 4
    for sid, condition in found:
        keys = [key for block in condition.values() for key in block if key not in _ALWAYS]
        for item in [one for one in statements("operator.json") if sid in (one["Sid"], "all")]:
            kinds = {arn.split(":", 5)[-1].partition("/")[0] for arn in listed(item["Resource"])}
            for action in listed(item["Action"]):
                assert unsupported(action, kinds, keys) == [], (sid, action)


# -- the policies in effect ----------------------------------------------------------------------------------


def test_operator_cannot_touch_what_is_not_a_clusters(operator: control.Simulator) -> None:
    administrator, ec2 = client_of(operator, "ec2"), own_client(operator, "ec2")
    image = administrator.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    request = {"ImageId": image, "InstanceType": "g5.xlarge", "MinCount": 1, "MaxCount": 1}
    instance = administrator.run_instances(**request)["Instances"][0]["InstanceId"]
    group = administrator.create_security_group(GroupName="theirs", Description="d")["GroupId"]
    volume = administrator.create_volume(AvailabilityZone="us-east-1a", Size=8)["VolumeId"]
    key = administrator.create_key_pair(KeyName="theirs")["KeyPairId"]
    rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    own_tags = [{"Key": TAG, "Value": "c-0123456789"}]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("terminate_instances", {"InstanceIds": [instance]}),
        ("delete_security_group", {"GroupId": group}),
        ("authorize_security_group_ingress", {"GroupId": group, "IpPermissions": [rule]}),
        ("delete_volume", {"VolumeId": volume}),
        ("delete_key_pair", {"KeyPairId": key}),
        ("create_tags", {"Resources": [instance], "Tags": own_tags}),  # would make it a cluster's
        ("create_tags", {"Resources": [instance], "Tags": [{"Key": "cloudddp:node-rank", "Value": "0"}]}),
        ("create_tags", {"Resources": [volume], "Tags": [{"Key": "cloudddp:expires", "Value": "x"}]}),
        ("delete_tags", {"Resources": [instance]}),
        ("run_instances", request),
        ("create_security_group", {"GroupName": "more", "Description": "d"}),
        ("import_key_pair", {"KeyName": "more", "PublicKeyMaterial": b"ssh-ed25519 AAAA"}),
    ]
    for method, arguments in calls:
        with refused("UnauthorizedOperation"):
            getattr(ec2, method)(**arguments)
    administrator.terminate_instances(InstanceIds=[instance])


def test_only_ranks_and_deadlines_can_be_tagged_later(operator: control.Simulator) -> None:
    """`up` tags nodes with their ranks if EC2 has not numbered them; `extend` moves the deadline."""
    administrator, ec2 = client_of(operator, "ec2"), own_client(operator, "ec2")
    image = administrator.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    tags = [{"ResourceType": "instance", "Tags": [{"Key": TAG, "Value": "c-0123456789"}]}]
    request = {"ImageId": image, "InstanceType": "g5.xlarge", "MinCount": 1, "MaxCount": 1}
    instance = administrator.run_instances(**request, TagSpecifications=tags)["Instances"][0]["InstanceId"]
    rank = {"Key": "cloudddp:node-rank", "Value": "3"}
    ec2.create_tags(Resources=[instance], Tags=[rank])
    ec2.create_tags(Resources=[instance], Tags=[{"Key": "cloudddp:expires", "Value": "2026-12-01T08:00:00Z"}])
    for other in ({"Key": TAG, "Value": "c-9876543210"}, {"Key": "cloudddp:owner", "Value": "user/eve"}):
        with refused("UnauthorizedOperation"):
            ec2.create_tags(Resources=[instance], Tags=[rank, other])
    ec2.terminate_instances(InstanceIds=[instance])


def test_operator_may_replace_a_node(operator: control.Simulator, project: Path) -> None:
    env = clean_environment(
        CLOUDDDP_HOME=str(operator.home), CLOUDDDP_YES="1", **control.environment(operator)
    )
    cli = CommandLine(project, "project", env)
    cli.write("cloudddp.toml", '[job]\nrendezvous = "direct"\nnproc_per_node = 1\n')
    cli.write("script.py", "raise SystemExit(3)\n")
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    assert cli("launch", "script.py").returncode == 3
    cli.fails(3, "resume", "--replace", "0")
    assert len(json.loads(cli.ok("status", "--json"))[0]["nodes"]) == 2
    cli.ok("down", "-y")
    assert remaining(client_of(operator, "ec2"), cli.cluster).nothing


def test_users_can_be_limited_to_their_own_clusters() -> None:
    document = json.loads((FOLDER / "operator.json").read_text())
    for sid, condition in further_restrictions():
        for item in document["Statement"]:
            if item["Sid"] == sid:
                for operator, block in condition.items():
                    item.setdefault("Condition", {}).setdefault(operator, {}).update(block)
    policy = documents.parse(json.dumps(document))
    group = "arn:aws:ec2:us-east-1:123456789012:security-group/sg-0"
    for owner, allowed in (("user/eve", False), ("user/moto", True)):
        context = {f"aws:ResourceTag/{TAG}": ("c-0123456789",), "aws:ResourceTag/cloudddp:owner": (owner,)}
        check = Check("ec2:DeleteSecurityGroup", group, {**context, "aws:username": ("moto",)})
        assert evaluate(check, policy).allowed is allowed, owner


def test_reader_reads_only() -> None:
    actions = [action for item in statements("read-only.json") for action in listed(item["Action"])]
    assert all(re.match(r"\w+:(Describe|Get|List|Decode)", action) for action in actions), actions

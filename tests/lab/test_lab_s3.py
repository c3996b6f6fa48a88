"""Amazon S3 as nodes reach it: credentials of their role in the metadata, its permissions, routes and
security groups."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import paramiko
import pytest
from support.buckets import make_bucket, make_profile, policy
from support.labnode import LabLaptop, shell
from support.simlab import client_of

from cloudddp.simulator import control

BUCKET = "results-of-a-test"
# Runs on the node, with the boto3 of its Python: prints what the call returns, or AWS's error code.
CALL = """
import boto3, json, sys
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
config = Config(connect_timeout=2, retries={"total_max_attempts": 1})
s3 = boto3.client("s3", region_name=sys.argv[1], config=config)
try:
    answer = getattr(s3, sys.argv[2])(**json.loads(sys.argv[3]))
    print("ok")
except ClientError as error:
    print(error.response["Error"]["Code"], error.response["Error"].get("Message", ""))
except BotoCoreError as error:
    print(type(error).__name__)
"""


@dataclass
class Node:
    """A node, on which calls are made."""

    client: paramiko.SSHClient

    def s3(self, method: str, region: str = "us-east-1", variables: str = "", **params: Any) -> str:
        words = ["/opt/pytorch/bin/python", "-c", CALL, region, method, json.dumps(params)]
        return shell(self.client, f"env {variables} {shlex.join(words)}").strip()


@pytest.fixture(scope="module")
def bucket(lab: control.Simulator) -> Iterator[str]:
    yield from make_bucket(client_of(lab, "s3"), BUCKET)


@pytest.fixture(scope="module")
def profile(lab: control.Simulator) -> Iterator[str]:
    yield from make_profile(client_of(lab, "iam"), "writer", policy(BUCKET, "allowed/"))


@pytest.fixture(scope="module")
def node(shared_lab_laptop: LabLaptop, bucket: str, profile: str) -> Node:
    instance = shared_lab_laptop.launch(IamInstanceProfile={"Name": profile})[0]
    return Node(shared_lab_laptop.login(instance))


def test_role_may_write_where_its_policy_allows(node: Node, lab: control.Simulator) -> None:
    assert node.s3("put_object", Bucket=BUCKET, Key="allowed/a b+%é", Body="written") == "ok"
    answer = client_of(lab, "s3").get_object(Bucket=BUCKET, Key="allowed/a b+%é")
    assert answer["Body"].read() == b"written"


def test_role_may_not_write_or_read_elsewhere(node: Node) -> None:
    denied = node.s3("put_object", Bucket=BUCKET, Key="other/a", Body="x")
    assert denied.startswith("AccessDenied User: arn:aws:sts::123456789012:assumed-role/writer/i-"), denied
    assert f"s3:PutObject on resource: arn:aws:s3:::{BUCKET}/other/a" in denied
    assert node.s3("get_object", Bucket=BUCKET, Key="allowed/a").startswith("AccessDenied")
    unknown = {"variables": "AWS_ACCESS_KEY_ID=a AWS_SECRET_ACCESS_KEY=b", "Key": "allowed/a", "Body": "x"}
    assert node.s3("put_object", Bucket=BUCKET, **unknown).startswith("InvalidAccessKeyId")

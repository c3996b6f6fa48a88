"""Buckets and roles in the simulator's account."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def policy(bucket: str, prefix: str) -> str:
    """The policy of a role that may write below a prefix, as infra/iam/results.json has it."""
    document = (ROOT / "infra" / "iam" / "results.json").read_text()
    return document.replace("BUCKET/PREFIX/", f"{bucket}/{prefix}")


def make_profile(iam: Any, name: str, document: str) -> Iterator[str]:
    """An instance profile whose role has this policy, both of this name."""
    trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    iam.create_role(
        RoleName=name, AssumeRolePolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [trust]})
    )
    iam.put_role_policy(RoleName=name, PolicyName="results", PolicyDocument=document)
    iam.create_instance_profile(InstanceProfileName=name)
    iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
    yield name
    iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=name)
    iam.delete_instance_profile(InstanceProfileName=name)
    iam.delete_role_policy(RoleName=name, PolicyName="results")
    iam.delete_role(RoleName=name)


def make_bucket(s3: Any, name: str, region: str = "us-east-1") -> Iterator[str]:
    """A bucket, removed with its objects."""
    more = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    s3.create_bucket(Bucket=name, **more)
    yield name
    for key in objects(s3, name):
        s3.delete_object(Bucket=name, Key=key)
    s3.delete_bucket(Bucket=name)


def objects(s3: Any, bucket: str, prefix: str = "") -> dict[str, int]:
    """The keys below a prefix, with their sizes."""
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return {one["Key"]: one["Size"] for page in pages for one in page.get("Contents", ())}

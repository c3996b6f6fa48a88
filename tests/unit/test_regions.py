"""The regions that have EC2, as `--region` is checked against them."""

from __future__ import annotations

import botocore.session
import pytest

from cloudddp.aws import client
from cloudddp.formats import region_list


def test_regions_are_those_of_botocore() -> None:
    session = botocore.session.Session()
    theirs = [
        region
        for partition in session.get_available_partitions()
        for region in session.get_available_regions("ec2", partition_name=partition)
    ]
    assert sorted(client.regions(session)) == sorted(theirs)
    assert {"us-east-1", "cn-north-1", "us-gov-west-1"} <= set(theirs)


@pytest.mark.parametrize(
    ("names", "shown"),
    [("a", "a"), ("abcd", "a, b, c, d"), ("abcde", "a, b, c and 2 other regions"), ("", "")],
)
def test_many_regions_are_counted(names: str, shown: str) -> None:
    assert region_list(names) == shown

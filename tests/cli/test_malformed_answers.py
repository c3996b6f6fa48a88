"""Answers of AWS that lack a field or hold what AWS never sends are errors that name the call."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from support.faults import FaultyEndpoint, Rewrite, dropping, with_value

from cloudddp.aws.client import AWS
from cloudddp.errors import AWSError

# An element of the answer that cloudddp needs, for each call of `up` before it creates anything
NEEDED = {
    "DescribeInstances": "reservationSet",
    "DescribeInstanceTypes": "processorInfo",
    "GetParameter": "Parameter",
    "DescribeImages": "imagesSet",
    "DescribeVpcs": "vpcSet",
    "DescribeSubnets": "availableIpAddressCount",
    "DescribeInstanceTypeOfferings": "location",
    "DescribeRouteTables": "routeTableSet",
    "DescribeVpcBlockPublicAccessOptions": "vpcBlockPublicAccessOptions",
}
LONG = "x" * 300_000
INVALID = [
    ("DescribeInstanceTypes", "defaultVCpus", "9" * 5000),
    ("DescribeVpcs", "vpcId", LONG),
    ("DescribeSubnets", "subnetId", "subnet-1\nhint: run rm"),
]


def check(done: Any, action: str) -> None:
    """The call is named, on a line of limited length, without a traceback."""
    text = done.stdout + done.stderr
    assert done.returncode == 1, text[:2000]
    assert "a bug in cloudddp" not in text
    assert "Traceback" not in text
    assert len(text) < 20_000
    assert "rm" not in [line.split()[-1] for line in text.splitlines() if line.startswith("hint: run")]
    assert f"ec2:{action}" in text or action == "GetParameter"  # whose value is checked as an image id


def refused(cli: Any, faults: FaultyEndpoint, remains: Any, action: str, change: Rewrite) -> None:
    faults.rewrite(action, change)
    check(cli("up", "-n", "1"), action)
    assert faults.count("ImportKeyPair") == faults.count("RunInstances") == 0
    assert remains().nothing


@pytest.mark.parametrize(("action", "element"), NEEDED.items())
def test_missing_field_is_an_error_that_names_the_call(
    cli: Any, faults: FaultyEndpoint, remains: Any, action: str, element: str
) -> None:
    refused(cli, faults, remains, action, dropping(element))


@pytest.mark.parametrize(
    ("action", "element", "value"), INVALID, ids=[f"{a}-{e}-{v[:12]!r}" for a, e, v in INVALID]
)
def test_invalid_value_is_an_error_that_names_the_call(
    cli: Any, faults: FaultyEndpoint, remains: Any, action: str, element: str, value: str
) -> None:
    refused(cli, faults, remains, action, with_value(element, value))


# -- answers to creating calls, and to those of other commands -----------------------------------------------


@pytest.mark.parametrize(
    ("action", "element"), [("CreateSecurityGroup", "groupId"), ("RunInstances", "instanceId")]
)
def test_creating_call_without_an_id_is_undone(
    cli: Any, faults: FaultyEndpoint, remains: Any, action: str, element: str
) -> None:
    """What was created is found by its tags."""
    faults.rewrite(action, dropping(element))
    check(cli("up", "-n", "1", CLOUDDDP_TIME_SCALE="0.1"), action)
    assert remains().nothing


def test_teardown_reports_answers_that_it_cannot_use(cli: Any, faults: FaultyEndpoint, remains: Any) -> None:
    """Instead of believing that nothing exists. Long text that is only shown prevents no teardown."""
    cli.ok("up", "-n", "1")
    faults.rewrite("DescribeInstances", with_value("clientToken", LONG))
    assert len(cli.ok("status")) < 5000
    for action, element in (("DescribeInstances", "instancesSet"), ("DescribeSecurityGroups", "groupId")):
        faults.rewrite(action, dropping(element))
        done = cli("down", "-y")
        assert done.returncode in (1, 3), done.stderr
        assert "a bug in cloudddp" not in done.stderr
        assert f"ec2:{action}" in done.stderr
        faults.rewrite(action, with_value("clientToken", LONG))
    cli.ok("down", "-y")
    assert remains().nothing


def test_elastic_ips_without_a_list(cli: Any, faults: FaultyEndpoint, remains: Any) -> None:
    faults.rewrite("DescribeAddresses", dropping("addressesSet"))
    check(cli("up", "-n", "2", "-t", "p4d.24xlarge", "--price", "1"), "DescribeAddresses")
    assert remains().nothing


def test_quota_that_is_no_number_is_a_warning(cli: Any, faults: FaultyEndpoint) -> None:
    faults.rewrite("GetServiceQuota", with_value("Value", "NaN"))
    text = cli.ok("doctor")
    assert "cannot be read: AWS's answer to servicequotas:GetServiceQuota" in " ".join(text.split())


# -- pages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("repeated", "calls"), [(True, 2), (False, 501)])
def test_listing_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch, repeated: bool, calls: int) -> None:
    """The same page again and again, and a new page again and again: answers inside botocore."""
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    aws, numbers = AWS(region="us-east-1"), itertools.count(1)

    def answer(**_: Any) -> Any:
        number = next(numbers)
        return SimpleNamespace(status_code=200), {"Vpcs": [], "NextToken": str(0 if repeated else number)}

    aws.client("ec2").meta.events.register("before-call.ec2.DescribeVpcs", answer)
    with pytest.raises(AWSError, match="ec2:DescribeVpcs"):
        aws.listed("describe_vpcs", dict[str, Any])
    assert next(numbers) == calls + 1


# -- messages ------------------------------------------------------------------------------------------------


def test_message_of_aws_is_bounded_and_on_one_line(cli: Any, faults: FaultyEndpoint, remains: Any) -> None:
    """It cannot imitate a hint or a row of a table."""
    faults.fail("DescribeVpcs", "Odd" * 1000, times=9, message="no\nhint: run rm\n" + "x" * 3_000_000)
    done = cli("up", "-n", "1")
    check(done, "DescribeVpcs")
    assert len(done.stderr) < 2000
    assert "refused" in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("hint: run")] == []
    assert remains().nothing


def test_answer_that_is_no_xml_is_not_printed_whole(cli: Any, faults: FaultyEndpoint) -> None:
    faults.rewrite("DescribeInstances", lambda _: b"<html>\nhint: run rm\n" + b"x" * 300_000)
    check(cli("status"), "DescribeInstances")

"""Answers of AWS that lack a field or hold what AWS never sends are errors that name the call."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from support.faults import FaultyEndpoint, Rewrite, dropping, with_value

# Elements of the answers that cloudddp needs, for each call of `up` before it creates anything
NEEDED = {
    "DescribeInstances": "reservationSet",
    "DescribeInstanceTypes": "instanceTypeSet processorInfo supportedArchitectures vCpuInfo defaultVCpus",
    "GetParameter": "Parameter Value",
    "DescribeImages": "imagesSet",
    "DescribeVpcs": "vpcSet vpcId",
    "DescribeSubnets": "subnetSet subnetId vpcId availabilityZone availableIpAddressCount",
    "DescribeInstanceTypeOfferings": "instanceTypeOfferingSet location",
    "DescribeRouteTables": "routeTableSet",
    "DescribeVpcBlockPublicAccessOptions": "vpcBlockPublicAccessOptions",
}
REQUIRED = [(action, element) for action, elements in NEEDED.items() for element in elements.split()]
LONG = "x" * 300_000
INVALID = [
    ("DescribeInstanceTypes", "defaultVCpus", "many"),
    ("DescribeInstanceTypes", "defaultVCpus", "9" * 5000),
    ("DescribeImages", "rootDeviceName", LONG),
    ("DescribeVpcs", "vpcId", LONG),
    ("DescribeSubnets", "subnetId", "subnet-1\nhint: run rm"),
    ("DescribeSubnets", "availableIpAddressCount", "1e9"),
    ("DescribeInstanceTypeOfferings", "location", LONG),
    ("DescribeRouteTables", "destinationCidrBlock", LONG),
]
_CALLS = {"GetParameter": "ssm:GetParameter", "GetServiceQuota": "servicequotas:GetServiceQuota"}


def call_of(action: str) -> str:
    """Return the call as messages name it."""
    return _CALLS.get(action) or (action if ":" in action else f"ec2:{action}")


def check(done: Any, action: str) -> None:
    """The call is named, on a line of limited length, without a traceback."""
    text = done.stdout + done.stderr
    assert done.returncode == 1, text[:2000]
    assert "a bug in cloudddp" not in text
    assert "Traceback" not in text
    assert len(text) < 20_000
    assert "rm" not in [line.split()[-1] for line in text.splitlines() if line.startswith("hint: run")]
    assert call_of(action) in text or action == "GetParameter"  # whose value is checked as an image id


def refused(cli: Any, faults: FaultyEndpoint, remains: Any, action: str, change: Rewrite) -> None:
    faults.rewrite(action, change)
    check(cli("up", "-n", "1"), action)
    assert faults.count("ImportKeyPair") == faults.count("RunInstances") == 0
    assert remains().nothing


@pytest.mark.parametrize(("action", "element"), REQUIRED, ids=[f"{a}-{e}" for a, e in REQUIRED])
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
    for action, element in (
        ("DescribeInstances", "instancesSet"),
        ("DescribeSecurityGroups", "groupId"),
        ("DescribeKeyPairs", "keyPairId"),
    ):
        faults.rewrite(action, dropping(element))
        done = cli("down", "-y")
        assert done.returncode in (1, 3), done.stderr
        assert "a bug in cloudddp" not in done.stderr
        assert call_of(action) in done.stderr
        faults.rewrite(action, with_value("clientToken", LONG))
    cli.ok("down", "-y")
    assert remains().nothing


@pytest.mark.parametrize(
    ("action", "element"),
    [("DescribeAddresses", "addressesSet"), ("DescribeAccountAttributes", "accountAttributeSet")],
)
def test_elastic_ips_without_a_list(
    cli: Any, faults: FaultyEndpoint, remains: Any, action: str, element: str
) -> None:
    faults.rewrite(action, dropping(element))
    check(cli("up", "-n", "2", "-t", "p4d.24xlarge", "--price", "1"), action)
    assert remains().nothing


@pytest.mark.parametrize("change", [dropping("Quota"), dropping("Value"), with_value("Value", "NaN")])
def test_quota_that_is_no_number_is_a_warning(cli: Any, faults: FaultyEndpoint, change: Rewrite) -> None:
    faults.rewrite("GetServiceQuota", change)
    text = cli.ok("doctor")
    assert "cannot be read: AWS's answer to servicequotas:GetServiceQuota" in " ".join(text.split())


# -- pages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeated", [True, False])
def test_listing_without_end_is_an_error(cli: Any, faults: FaultyEndpoint, repeated: bool) -> None:
    """The same page again and again, and a new page again and again."""
    numbers = itertools.count()

    def change(body: bytes) -> bytes:
        token = f"<nextToken>{0 if repeated else next(numbers)}</nextToken>".encode()
        return re.sub(rb"(<nextToken>.*?</nextToken>|<nextToken */>)", b"", body).replace(
            b"<vpcSet>", token + b"<vpcSet>"
        )

    faults.rewrite("DescribeVpcs", change)
    check(cli("up", "-n", "1"), "DescribeVpcs")
    assert faults.count("DescribeVpcs") == (2 if repeated else 501)


# -- messages ------------------------------------------------------------------------------------------------


def test_message_of_aws_is_bounded_and_on_one_line(cli: Any, faults: FaultyEndpoint, remains: Any) -> None:
    """It cannot imitate a hint or a row of a table."""
    for action in ("DescribeVpcs", "GetCallerIdentity", "DescribeInstances"):
        faults.fail(action, "Odd" * 1000, times=9, message="no\nhint: run rm\n" + "x" * 3_000_000)
        done = cli("up", "-n", "1")
        check(done, action.replace("GetCallerIdentity", "sts:GetCallerIdentity"))
        assert len(done.stderr) < 2000
        assert "refused" in done.stderr
        assert [line for line in done.stderr.splitlines() if line.startswith("hint: run")] == []
        faults.clear()
    assert remains().nothing


def test_answer_that_is_no_xml_is_not_printed_whole(cli: Any, faults: FaultyEndpoint) -> None:
    faults.rewrite("DescribeInstances", lambda _: b"<html>\nhint: run rm\n" + b"x" * 300_000)
    check(cli("status"), "DescribeInstances")

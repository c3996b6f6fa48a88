"""`cloudddp doctor`: what it checks, that it creates nothing, and the fix of each problem."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

from support.networks import Vpc

CREATING = {"RunInstances", "CreateSecurityGroup", "ImportKeyPair"}
CHECKS = {
    *("OpenSSH", "disk", "identity", "clock", "SSH from", "outgoing SSH", "instance type", "image"),
    *("network", "price", "quota", "ec2:ImportKeyPair", "ec2:CreateSecurityGroup"),
    *("ec2:CreatePlacementGroup", "ec2:RunInstances", "capacity"),
}


def checks(cli: Any, *flags: str, code: int = 0, **env: str) -> dict[str, dict[str, str]]:
    done = cli.exits(code, "doctor", "--json", *flags, **env)
    return {one["name"]: one for one in json.loads(done.stdout)}


def test_everything_passes_and_nothing_is_created(cli: Any, faults: Any, remains: Any) -> None:
    found = checks(cli, "-n", "2", "--price", "1")  # a list of prices gets old
    assert set(found) == CHECKS
    assert {name: one["status"] for name, one in found.items() if one["status"] != "pass"} == {
        "capacity": "note"
    }
    assert found["capacity"]["detail"].startswith("not checked: only a launch shows")
    assert remains().nothing
    assert {f"{action} (dry run)" for action in CREATING} <= set(faults.calls)
    assert not CREATING & set(faults.calls)


def test_insufficient_quota_names_the_request_for_more(cli: Any, ec2: Any, conditions: Any) -> None:
    """GetServiceQuota answers the limit in vCPUs; running instances of the families count against it. A name
    that is taken is no missing permission."""
    before = int(re.findall(r"(\d+) in use", checks(cli)["quota"]["detail"])[0])  # other tests' clusters
    key = ec2.create_key_pair(KeyName=f"cloudddp-{cli.cluster}")["KeyPairId"]
    conditions(quota={"on-demand-g": before + 6})
    try:
        found = checks(cli, "-n", "2", code=1)["quota"]
        enough = checks(cli, "-n", "1")
    finally:
        ec2.delete_key_pair(KeyPairId=key)
    assert found["status"] == "fail"
    assert found["detail"].endswith(f"(L-DB2E81BA): {before + 6} vCPUs, {before} in use, 8 needed")
    assert f"--quota-code L-DB2E81BA --desired-value {before + 8}`" in found["fix"]
    assert enough["quota"]["status"] == enough["ec2:ImportKeyPair"]["status"] == "pass"


def test_spot_has_quotas_of_its_own(cli: Any, conditions: Any) -> None:
    """P6 is counted under a quota that is named for P5."""
    conditions(quota={"spot-g": 4, "on-demand-g": 1000, "spot-p5": 1000})
    assert checks(cli, "-n", "2", "--spot", code=1)["quota"]["detail"].startswith("All G and VT Spot")
    conditions(quota={"spot-p5": 10})  # another quota may count
    small = checks(cli, "-n", "1", "--spot", "-t", "p6-b200.48xlarge")["quota"]
    assert small["status"] == "warn"
    assert "All P5 Spot Instance Requests (L-C4BD4855)" in small["detail"]
    assert "AWS does not document that p6-b200 counts against it" in small["detail"]
    assert "--quota-code L-C4BD4855" in small["fix"]


def test_what_cannot_be_read_or_is_old_is_a_warning(
    cli: Any, conditions: Any, faults: Any, tmp_path: Path
) -> None:
    denied = {"GetServiceQuota": {"code": "AccessDeniedException", "status": 400, "calls": 9}}
    conditions(reject=denied, prices={"g5.xlarge": 1.5})
    faults.rewrite("GetProducts", lambda body: body.replace(b"2026-11-01", b"2020-01-01"))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    found = checks(cli, CLOUDDDP_CHECKSSH=f"127.0.0.1:{port}", PATH=str(tmp_path))
    for name in ("quota", "price", "outgoing SSH", "OpenSSH"):
        assert found[name]["status"] == "warn", name
    assert checks(cli, code=1, CLOUDDDP_CHECKSSH="nowhere")["outgoing SSH"]["status"] == "fail"


def test_missing_permission_is_named(cli: Any, conditions: Any, remains: Any) -> None:
    """With DryRun, EC2 answers UnauthorizedOperation, or DryRunOperation if the call is allowed."""
    conditions(reject={"RunInstances": {"code": "UnauthorizedOperation", "status": 403, "calls": 9}})
    found = checks(cli, code=1)
    assert [name for name, one in found.items() if one["status"] == "fail"] == ["ec2:RunInstances"]
    assert remains().nothing


def test_clock_that_is_wrong_is_named(cli: Any, simulator: Any, faults: Any, conditions: Any) -> None:
    """AWS refuses requests whose time differs by more than 5 minutes (Signature Version 4): it answers
    SignatureDoesNotMatch, and its own time."""
    faults.date = "Thu, 01 Jan 2026 00:00:00 GMT"
    found = checks(cli, code=1)["clock"]
    assert (found["status"], "set the clock" in found["fix"]) == ("fail", True)
    conditions(clock={"ahead": 900})
    found = checks(cli, code=1, AWS_ENDPOINT_URL=simulator.endpoint)
    assert found["clock"]["status"] == "fail"
    assert "15 minutes" in found["clock"]["detail"]
    assert "set the clock" in found["clock"]["fix"]
    assert "identity" in found["not checked"]["detail"]


def test_image_network_and_price_are_checked_with_the_settings(cli: Any, ec2: Any) -> None:
    vpc = Vpc(ec2, "10.93.0.0/16")
    try:
        subnet = vpc.subnet("10.93.1.0/24", "us-east-1a")
        found = checks(cli, "-t", "p3dn.24xlarge", "--subnets", subnet, code=1)
    finally:
        vpc.close()
    assert "NVIDIA V100" in found["image"]["detail"]
    assert "no subnet has a route to an internet gateway" in found["network"]["detail"] or (
        "not offered" in found["network"]["detail"]
    )
    assert not any(name.startswith("ec2:") for name in found)
    assert found["not checked"]["detail"] == "permissions"


def test_each_region_is_checked(cli: Any) -> None:
    found = checks(cli, "--regions", "us-east-1,eu-west-3", "-t", "p4d.24xlarge")  # one passes
    assert found["us-east-1: instance type"]["status"] == "pass"
    assert found["eu-west-3: instance type"]["status"] == "fail"
    assert found["eu-west-3: instance type"]["region"] == "eu-west-3"
    assert found["identity"]["region"] is None
    alone = checks(cli, "--region", "eu-west-3", "-t", "p4d.24xlarge", code=1)
    assert alone["not checked"]["detail"] == "image, network, price, quota, permissions"


REFUSED = {"status": 401, "message": "AWS was not able to validate the provided access credentials"}


def test_region_that_the_account_has_not_enabled_is_named(cli: Any, faults: Any) -> None:
    """EC2 refuses valid credentials there; so does STS, which therefore must not be asked there."""
    faults.fail("DescribeInstances@af-south-1", "AuthFailure", times=99, **REFUSED)
    faults.fail("GetCallerIdentity@af-south-1", "InvalidClientTokenId", times=99, status=403)
    found = checks(cli, "--regions", "af-south-1,us-east-1")  # the other one passes
    region = found["af-south-1: region"]
    assert (region["status"], region["region"]) == ("fail", "af-south-1")
    assert region["detail"].startswith(
        "af-south-1 refuses the credentials that us-east-1 accepts (AuthFailure)"
    )
    assert "version 1 STS token" in region["detail"]
    assert "aws account enable-region --region-name af-south-1" in region["fix"]
    assert [name for name in found if name.startswith("af-south-1")] == ["af-south-1: region"]
    assert found["identity"]["status"] == "pass"
    assert found["us-east-1: network"]["status"] == "pass"
    alone = checks(cli, "--region", "af-south-1", code=1)
    assert alone["region"]["detail"] == region["detail"]
    assert set(alone) == {"OpenSSH", "disk", "region", "not checked"}


def test_unknown_credentials_end_the_checks_and_are_no_region_that_is_not_enabled(
    cli: Any, faults: Any
) -> None:
    faults.fail("DescribeInstances", "AuthFailure", times=99, **REFUSED)
    faults.fail("GetCallerIdentity", "InvalidClientTokenId", times=99, status=403)
    found = checks(cli, "--regions", "af-south-1,us-east-1", code=1)
    assert set(found) == {"OpenSSH", "disk", "identity", "not checked"}
    assert found["not checked"]["detail"].startswith("clock, SSH, instance type, image, network, ")
    assert "InvalidClientTokenId" in found["identity"]["detail"]
    assert "aws configure" in found["identity"]["fix"]


def test_reservation_is_checked(cli: Any, ec2: Any) -> None:
    """Its places are counted already, so the vCPU quota is not checked. It has 1 place, and 2 nodes need
    2."""
    answer = ec2.create_capacity_reservation(
        InstanceType="g5.xlarge",
        InstancePlatform="Linux/UNIX",
        AvailabilityZone="us-east-1b",
        InstanceCount=1,
    )
    found = answer["CapacityReservation"]["CapacityReservationId"]
    try:
        passed = checks(cli, "-n", "1", "--reservation", found)
        failed = checks(cli, "-n", "2", "--reservation", found, code=1)
    finally:
        ec2.cancel_capacity_reservation(CapacityReservationId=found)
    assert (passed["reservation"]["status"], failed["reservation"]["status"]) == ("pass", "fail")
    assert "us-east-1b" in passed["network"]["detail"]
    assert "quota" not in passed
    missing = checks(cli, "--reservation", "cr-0123456789abcdef0", code=1)["reservation"]
    assert "cr-0123456789abcdef0" in missing["detail"]

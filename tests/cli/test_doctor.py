"""`cloudddp doctor`: what it checks, that it creates nothing, and the fix of each problem."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.networks import Vpc

CREATING = {"RunInstances", "CreateSecurityGroup", "ImportKeyPair"}
CHECKS = {
    "OpenSSH", "disk", "identity", "clock", "SSH from", "way out to SSH", "instance type", "image", "network", "price",
    "quota", "ec2:ImportKeyPair", "ec2:CreateSecurityGroup", "ec2:RunInstances",
}  # fmt: skip


@pytest.fixture
def conditions(simulator: Any, cli: Any) -> Iterator[Callable[..., dict[str, Any]]]:
    def post(**body: Any) -> dict[str, Any]:
        page = urllib.request.Request(
            f"{simulator.endpoint}/_cloudddp/conditions", data=json.dumps(body).encode()
        )
        with urllib.request.urlopen(page, timeout=30) as answer:
            return dict(json.load(answer))

    yield post
    post(clear=True)


def checks(cli: Any, *flags: str, code: int = 0, **env: str) -> dict[str, dict[str, str]]:
    done = cli("doctor", "--json", *flags, **env)
    assert done.returncode == code, done.stderr
    return {one["check"]: one for one in json.loads(done.stdout)}


def test_everything_passes_and_nothing_is_created(cli: Any, faults: Any, remains: Any) -> None:
    found = checks(cli, "-n", "2")
    assert set(found) == CHECKS
    assert {one["result"] for one in found.values()} == {"pass"}
    assert remains().nothing
    creating = {"RunInstances", "ImportKeyPair", "CreateSecurityGroup"}
    assert {f"{action} (dry run)" for action in creating} <= set(faults.calls)
    assert not creating & set(faults.calls)


def test_table_for_people(cli: Any) -> None:
    out = cli.ok("doctor", "-n", "2")
    assert len(out.splitlines()) == len(CHECKS)
    assert "pass  instance type         g5.xlarge: 1 x NVIDIA A10G, 4 vCPUs" in out


def test_insufficient_quota_names_the_request_for_more(cli: Any, conditions: Any) -> None:
    """GetServiceQuota answers the limit in vCPUs; running instances of the families count against it."""
    cli.ok("up", "-n", "1")
    conditions(quota={"on-demand-g": 10})
    found = checks(cli, "-n", "2", code=1)["quota"]
    assert found["result"] == "fail"
    assert found["detail"].endswith("(L-DB2E81BA): 10 vCPUs, 4 in use, 8 needed")
    assert "--quota-code L-DB2E81BA --desired-value 12" in found["fix"]
    assert checks(cli, "-n", "1")["quota"]["result"] == "pass"


def test_spot_has_a_quota_of_its_own(cli: Any, conditions: Any) -> None:
    conditions(quota={"spot-g": 4, "on-demand-g": 1000})
    assert checks(cli, "-n", "2", "--spot", code=1)["quota"]["detail"].startswith("All G and VT Spot")


def test_unreadable_quota_is_a_warning(cli: Any, conditions: Any) -> None:
    conditions(reject={"GetServiceQuota": {"code": "AccessDeniedException", "status": 400, "calls": 9}})
    assert checks(cli)["quota"]["result"] == "warn"


@pytest.mark.parametrize("action", ["RunInstances", "CreateSecurityGroup", "ImportKeyPair"])
def test_missing_permission_is_named(cli: Any, conditions: Any, action: str, remains: Any) -> None:
    """With DryRun, EC2 answers UnauthorizedOperation, or DryRunOperation if the call is allowed."""
    conditions(reject={action: {"code": "UnauthorizedOperation", "status": 403, "calls": 9}})
    found = checks(cli, code=1)
    assert [name for name, one in found.items() if one["result"] == "fail"] == [f"ec2:{action}"]
    assert remains().nothing


def test_unknown_credentials_end_the_checks(cli: Any, conditions: Any) -> None:
    conditions(reject={"GetCallerIdentity": {"code": "ExpiredToken", "status": 403, "calls": 9}})
    found = checks(cli, code=1)
    assert set(found) == {"OpenSSH", "disk", "identity"}
    assert "ExpiredToken" in found["identity"]["detail"]


def test_clock_that_is_wrong_is_named(cli: Any, faults: Any) -> None:
    """AWS refuses requests whose time differs by more than 5 minutes (Signature Version 4)."""
    faults.date = "Thu, 01 Jan 2026 00:00:00 GMT"
    found = checks(cli, code=1)["clock"]
    assert (found["result"], "set the clock" in found["fix"]) == ("fail", True)


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


def test_blocked_way_out_is_a_warning(cli: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    found = checks(cli, CLOUDDDP_CHECKSSH=f"127.0.0.1:{port}")["way out to SSH"]
    assert found["result"] == "warn"
    assert checks(cli, code=1, CLOUDDDP_CHECKSSH="nowhere")["way out to SSH"]["result"] == "fail"


def test_missing_openssh_is_a_warning(cli: Any, tmp_path: Path) -> None:
    assert checks(cli, PATH=str(tmp_path))["OpenSSH"]["result"] == "warn"


def test_each_region_is_checked(cli: Any) -> None:
    found = checks(cli, "--regions", "us-east-1,eu-west-3", "-t", "p4d.24xlarge", code=1)
    assert found["us-east-1: instance type"]["result"] == "pass"
    assert found["eu-west-3: instance type"]["result"] == "fail"


def test_name_that_is_taken_is_no_missing_permission(cli: Any) -> None:
    cli.ok("up", "-n", "1")
    assert checks(cli, "-n", "1")["ec2:ImportKeyPair"]["result"] == "pass"

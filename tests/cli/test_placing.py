"""`up` looks for capacity: zones and regions in order, the reasons of AWS, and waiting."""

from __future__ import annotations

import functools
import http.server
import json
import re
import signal
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.harness import finished, instances_of, lines_until, remaining, wait_for

G5_ZONES = ("us-east-1a", "us-east-1b", "us-east-1c", "us-east-1d", "us-east-1f")
SCALED = {"CLOUDDDP_TIME_SCALE": "0.02"}


def zones_of(ec2: Any, instances: list[str]) -> set[str]:
    answer = ec2.describe_instances(InstanceIds=instances)
    return {i["Placement"]["AvailabilityZone"] for r in answer["Reservations"] for i in r["Instances"]}


def full(*zones: str, left: int = 0) -> dict[str, Any]:
    return {zone: {"g5.xlarge": left} for zone in zones}


def test_next_zone_is_tried_and_all_nodes_are_in_one(
    cli: Any, conditions: Any, ec2: Any, remains: Any
) -> None:
    """InsufficientInstanceCapacity: "try another Availability Zone" (EC2 API reference, "Error codes").
    MinCount is the number of nodes, so that one free place in a zone is not used."""
    conditions(capacity=full("us-east-1d", left=1))
    cli.ok("up", "-n", "2", "--zones", "us-east-1d,us-east-1c,us-east-1a")
    assert zones_of(ec2, remains().instances) == {"us-east-1c"}
    assert len(remains().instances) == 2
    assert (len(remains().groups), len(remains().keys)) == (1, 1)


def test_capacity_that_is_missing_after_the_launch_leads_to_the_next_zone(
    cli: Any, conditions: Any, ec2: Any, remains: Any
) -> None:
    """An accepted instance may terminate with the reason Server.InsufficientInstanceCapacity (EC2 API
    reference, "StateReason"). The others of the launch are billed, so they are terminated before the next
    zone is tried."""
    rule = {
        "code": "Server.InsufficientInstanceCapacity",
        "message": "Insufficient capacity.",
        "instances": 1,
    }
    conditions(fail_launch={"us-east-1a": rule}, capacity=full("us-east-1b"))
    cli.ok("up", "-n", "2")
    assert zones_of(ec2, remains().instances) == {"us-east-1c"}
    assert len(remains().instances) == 2


def test_throttled_launches_reach_the_zone_that_has_capacity(cli: Any, conditions: Any, remains: Any) -> None:
    """A lack of capacity is HTTP 500, and is not repeated in its zone: that would use up the bucket of
    RunInstances."""
    rate = {"RunInstances": {"bucket": 2, "refill": 0.5}}
    conditions(capacity=full(*G5_ZONES[:4]), request_rate=rate)
    cli.ok("up", "-n", "1", **SCALED)
    assert len(remains().instances) == 1


def test_throttle_that_lasts_longer_than_the_wait(cli: Any, conditions: Any, remains: Any) -> None:
    conditions(throttle={"RunInstances": 9999})
    words = ("up", "-n", "1", "--zones", "us-east-1a", "--wait-capacity", "2s")
    err = cli.fails(1, *words, CLOUDDDP_TIME_SCALE="0.02")
    assert "AWS throttles launches of this account; trying again" in err
    assert "in any of these zones within 2s" in err
    assert "RequestLimitExceeded" in err
    assert remains().nothing


def test_table_shows_what_was_tried(cli: Any, conditions: Any, faults: Any, remains: Any) -> None:
    rule = {"code": "Server.InsufficientInstanceCapacity", "instances": 1}
    conditions(capacity=full(*G5_ZONES[1:]), fail_launch={"us-east-1a": rule})
    err = cli.fails(1, "up", "-n", "2")
    assert "2 x g5.xlarge could not be launched in any of these zones:" in err
    for zone in G5_ZONES:
        assert re.search(rf"^  {zone}  (Server\.)?InsufficientInstanceCapacity +\S", err, re.MULTILINE), err
    assert "--wait-capacity" in err
    wider = "widen the search with --regions or --no-placement-group, or choose"
    assert wider in " ".join(err.split())  # all zones were tried
    assert faults.count("RunInstances") == len(G5_ZONES)
    assert remains().nothing


def test_quota_stops_at_once(cli: Any, conditions: Any, faults: Any, remains: Any) -> None:
    """The vCPU quota is that of the region: another zone does not help."""
    conditions(quota={"on-demand-g": 4})
    err = cli.fails(1, "up", "-n", "2")
    assert "AWS refused ec2:RunInstances: VcpuLimitExceeded" in err
    assert re.search(r"G and VT instances \(L-DB2E81BA\): 4 vCPUs, \d+ in use, 8 needed", err)
    request = "aws service-quotas request-service-quota-increase --region us-east-1 --service-code ec2"
    assert f"`{request} --quota-code L-DB2E81BA --desired-value " in err
    assert "`cloudddp doctor` checks it" in err
    assert faults.count("RunInstances") == 1
    assert remains().nothing


def test_quota_that_cannot_be_read_leaves_the_general_hint(cli: Any, conditions: Any) -> None:
    denied = {"code": "AccessDeniedException", "status": 400, "calls": 9}
    conditions(quota={"on-demand-g": 4}, reject={"GetServiceQuota": denied})
    err = cli.fails(1, "up", "-n", "2")
    assert "in the Service Quotas console, or use fewer nodes; `cloudddp doctor` names the quota" in err


def test_waiting_ends_after_its_time(cli: Any, conditions: Any, faults: Any, remains: Any) -> None:
    conditions(capacity=full("us-east-1a"))
    err = cli.fails(1, "up", "-n", "1", "--zones", "us-east-1a", "--wait-capacity", "3s", **SCALED)
    assert "could not be launched in any of these zones within 3s" in err
    assert "widen the search with --zones or --regions, or choose" in err
    assert faults.count("ImportKeyPair") > 1
    assert remains().nothing


def test_killed_wait_leaves_nothing(cli: Any, conditions: Any, faults: Any, remains: Any) -> None:
    """Also a computer that is switched off: between two attempts the account has nothing of the cluster."""
    conditions(capacity=full(*G5_ZONES))
    process = cli.start("up", "-n", "1", "--wait-capacity", "1h")
    wait_for(lambda: faults.count("DeleteKeyPair") and remains().nothing, "the first attempt is removed")
    process.kill()
    process.communicate(timeout=300)
    assert remains().nothing


def test_wait_shows_its_end_and_leaves_nothing_if_interrupted(
    cli: Any, conditions: Any, remains: Any
) -> None:
    conditions(capacity=full("us-east-1a"))
    process = cli.start("up", "-n", "1", "--zones", "us-east-1a", "--wait-capacity", "14d")
    shown = lines_until(process.stderr, "next attempt")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    end = datetime.now(UTC) + timedelta(days=14)
    assert re.search(rf"until ({end:%Y-%m-%d}|{end - timedelta(minutes=5):%Y-%m-%d}) \d\d:\d\d UTC", shown)
    assert "interrupted while waiting for capacity; nothing is running" in err
    assert "shows whether" not in err
    assert remains().nothing


# -- regions -------------------------------------------------------------------------------------------------


def test_next_region_is_tried(cli: Any, conditions: Any, remains: Any, other_region: Any) -> None:
    """Image, price and network are resolved in each region; other commands find the cluster where it is."""
    conditions(capacity=full(*G5_ZONES))
    cli.env["CLOUDDDP_PRICE"] = "1"
    err = cli.messages("up", "-n", "1", "--regions", "us-east-1,us-west-2")
    assert re.search(r"where +us-east-1: us-east-1a, else .*\n +else us-west-2: us-west-2a", err), err
    assert remains().nothing
    assert len(instances_of(other_region, cli.cluster)) == 1
    (shown,) = json.loads(cli.ok("status", "--json"))
    assert shown["region"] == "us-west-2"
    assert "already up" in cli.ok("up", "-n", "1")
    assert remains().nothing
    err = cli.messages("down", "-y")
    assert err.count("using region us-west-2") == 1
    assert remaining(other_region, cli.cluster).nothing


def test_no_region_offers_the_type(cli: Any, faults: Any) -> None:
    cli.env.update(CLOUDDDP_PRICE="30")
    one = cli.fails(2, "--region", "eu-west-3", "up", "-t", "p4d.24xlarge")
    assert "eu-west-3 does not offer p4d.24xlarge" in one
    both = cli.fails(1, "up", "-t", "p4d.24xlarge", "--regions", "eu-west-3,af-south-1")
    assert re.search(r"^  eu-west-3 .*does not offer", both, re.MULTILINE)
    assert re.search(r"^  af-south-1 .*does not offer", both, re.MULTILINE)
    assert not {"RunInstances", "ImportKeyPair"} & set(faults.calls)


@pytest.mark.parametrize(
    ("action", "code", "text"),
    [
        ("RunInstances (dry run)", "UnauthorizedOperation", "AWS denied ec2:RunInstances"),
        ("RunInstances", "VcpuLimitExceeded", "injected by the test"),
    ],
)
def test_refusal_of_one_region_leads_to_the_next(
    cli: Any, faults: Any, remains: Any, action: str, code: str, text: str
) -> None:
    """Policies and quotas belong to a region."""
    faults.fail(action, code, times=2, status=403)
    err = cli.fails(1, "up", "-n", "1", "--regions", "us-east-1,us-west-2", CLOUDDDP_PRICE="1")
    assert faults.count(action) == 2
    for region in ("us-east-1", "us-west-2"):
        assert re.search(rf"^  {region}a?  {code}  {text}", err, re.MULTILINE), err
    assert remains().nothing


# -- waiting: what it costs, and what ends it ----------------------------------------------------------------


def ended_launches(code: str) -> dict[str, Any]:
    return {"us-east-1a": {"code": code, "instances": 1, "launches": 999}}


def test_accepted_launches_that_end_are_not_repeated_forever(
    cli: Any, conditions: Any, faults: Any, remains: Any
) -> None:
    """Each is billed for at least 60 s per node."""
    conditions(fail_launch=ended_launches("Server.InternalError"), prices={"g5.xlarge": 60.0})
    err = cli.fails(1, "up", "-n", "2", "--zones", "us-east-1a", "--wait-capacity", "1h", **SCALED)
    assert faults.count("RunInstances") == 3
    assert "3 launches that AWS accepted ended before the nodes were ready" in err
    assert re.search(r"cost so far at most \$2\.0\d", err), err
    assert re.search(r"cost at most \$6\.\d\d", err), err
    assert remains().nothing


def test_accepted_launches_count_against_max_cost(
    cli: Any, conditions: Any, faults: Any, remains: Any
) -> None:
    conditions(fail_launch=ended_launches("Server.InsufficientInstanceCapacity"), prices={"g5.xlarge": 60.0})
    words = ("--zones", "us-east-1a", "--wait-capacity", "1h", "--max-cost", "13")
    err = cli.fails(1, "up", "-n", "1", *words, **SCALED)
    # 60 s cost $1, and the shortest lifetime of 10 minutes $10.
    assert faults.count("RunInstances") == 3
    assert "max_cost" in err
    assert remains().nothing


@pytest.mark.parametrize("fault", ["Unavailable", "lost"])
def test_outage_of_aws_does_not_end_the_wait(
    cli: Any, conditions: Any, faults: Any, remains: Any, fault: str
) -> None:
    conditions(capacity=full(*G5_ZONES))
    process = cli.start("up", "-n", "1", "--wait-capacity", "1h", **SCALED)
    wait_for(lambda: faults.count("DeleteKeyPair") and remains().nothing, "the first attempt is removed")
    if fault == "lost":
        faults.lose_answer("ImportKeyPair", times=5)
    else:
        faults.fail("ImportKeyPair", fault, times=5, status=503)
    conditions(clear=True)
    finished(process, 0)
    assert len(remains().instances) == 1


def test_price_that_has_risen_while_waiting_ends_the_wait(
    cli: Any, conditions: Any, faults: Any, remains: Any
) -> None:
    conditions(capacity=full(*G5_ZONES), prices={"g5.xlarge": 1.0})
    process = cli.start("up", "-n", "1", "--wait-capacity", "1h", **SCALED)
    wait_for(lambda: faults.count("DeleteKeyPair") and remains().nothing, "the first attempt is removed")
    conditions(prices={"g5.xlarge": 2.0})
    _, err = finished(process, 1)
    assert re.search(r"the price in us-east-1 has risen from \$1\.\d\d to \$2\.\d\d an hour", err), err
    assert remains().nothing


def test_address_of_the_computer_is_looked_up_again_while_waiting(
    cli: Any, conditions: Any, faults: Any, remains: Any, ec2: Any, tmp_path: Path
) -> None:
    """A laptop that is taken to another network would create nodes that it cannot reach."""
    (tmp_path / "address").write_text("192.0.2.1")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/address"
    blocks: list[str] = []
    try:
        conditions(capacity=full(*G5_ZONES))
        process = cli.start("up", "-n", "1", "--wait-capacity", "1h", **SCALED, CLOUDDDP_CHECKIP_URL=url)
        wait_for(lambda: faults.count("DeleteKeyPair") and remains().nothing, "the first attempt is removed")
        (tmp_path / "address").write_text("127.0.0.1")

        def admitted() -> bool:
            where = [{"Name": "tag:cloudddp:cluster", "Values": [cli.cluster]}]
            for group in ec2.describe_security_groups(Filters=where)["SecurityGroups"]:
                blocks.extend(one["CidrIp"] for rule in group["IpPermissions"] for one in rule["IpRanges"])
            return "127.0.0.1/32" in blocks

        wait_for(admitted, "the security group admits the new address")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
    finally:
        server.shutdown()
        server.server_close()
    assert remains().nothing


def test_region_that_the_account_has_not_enabled_is_left_out(cli: Any, faults: Any) -> None:
    del cli.env["CLOUDDDP_YES"]  # the plan is shown, and nothing is created
    message = "AWS was not able to validate the provided access credentials"
    faults.fail("DescribeInstances@us-west-2", "AuthFailure", times=9, status=401, message=message)
    done = cli("up", "-n", "1", "--regions", "us-west-2,us-east-1", CLOUDDDP_PRICE="1")
    assert "where" in done.stderr
    assert re.search(
        r"us-west-2 is left out: .*us-east-1.*has not enabled this region.*version 1 STS token", done.stderr
    )
    alone = cli.fails(1, "--region", "us-west-2", "up", "-n", "1", CLOUDDDP_PRICE="1")
    assert "left out" not in alone
    assert "us-west-2 refuses the credentials that us-east-1 accepts (AuthFailure)" in alone
    assert "aws account enable-region --region-name us-west-2" in alone
    assert "aws configure" not in alone

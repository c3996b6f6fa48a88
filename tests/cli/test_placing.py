"""`up` looks for capacity: zones and regions in order, the reasons of AWS, and waiting.

Most tests call it in this process, and their instances never boot.
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.retries.standard import ExponentialBackoff
from support.harness import instances_of, lines_until, remaining, wait_for
from support.interrupts import interrupted_at
from support.simlab import client_of
from support.teardown_account import Account

from cloudddp.aws.client import AWS
from cloudddp.errors import CloudDDPError

G5_ZONES = ("us-east-1a", "us-east-1b", "us-east-1c", "us-east-1d", "us-east-1f")


def full(*zones: str, left: int = 0) -> dict[str, Any]:
    return {zone: {"g5.xlarge": left} for zone in zones}


def text(error: CloudDDPError) -> str:
    return f"{error.message}\n{error.hint}"


def test_next_zone_is_tried_and_all_nodes_are_in_one(account: Account) -> None:
    """InsufficientInstanceCapacity: "try another Availability Zone" (EC2 API reference, "Error codes").
    MinCount is the number of nodes, so that one free place in a zone is not used.

    An accepted instance may terminate with the reason Server.InsufficientInstanceCapacity ("StateReason").
    The others of the launch are billed, so they are terminated before the next zone is tried.
    """
    rule = {"code": "Server.InsufficientInstanceCapacity", "message": "Insufficient.", "instances": 1}
    account.conditions(fail_launch={"us-east-1c": rule}, capacity=full("us-east-1d", left=1))
    nodes = account.up(zones=("us-east-1d", "us-east-1c", "us-east-1a"))
    answer = account.ec2.describe_instances(InstanceIds=nodes)["Reservations"]
    found = [i["Placement"]["AvailabilityZone"] for r in answer for i in r["Instances"]]
    assert found == ["us-east-1a"] * 2
    kinds = Counter(one.partition("-")[0] for one in account.listed())
    assert (kinds["i"], kinds["sg"], kinds["key"]) == (2, 1, 1)
    account.down()


def test_throttle_that_lasts_longer_than_the_wait(
    account: Account, limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the pauses of botocore between its own repetitions, up to 15 s for each call."""
    limits()
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.0)
    account.conditions(throttle={"RunInstances": 9999})
    error = account.failed_up(nodes=1, zones=("us-east-1a",), wait_capacity="2s")
    assert any("AWS throttles launches of this account; trying again" in one for one in account.progress)
    assert "in any of these zones within 2s" in error.message
    assert "RequestLimitExceeded" in error.message
    assert "widen the search with --zones or --regions, or choose" in error.hint
    assert account.listed() == []


def test_table_shows_what_was_tried(account: Account) -> None:
    rule = {"code": "Server.InsufficientInstanceCapacity", "instances": 1}
    account.conditions(capacity=full(*G5_ZONES[1:]), fail_launch={"us-east-1a": rule})
    error = account.failed_up()
    assert "2 x g5.xlarge could not be launched in any of these zones:" in error.message
    for zone in G5_ZONES:
        line = rf"^  {zone}  (Server\.)?InsufficientInstanceCapacity +\S"
        assert re.search(line, error.message, re.MULTILINE), error.message
    assert "--wait-capacity" in error.hint
    # All zones were tried.
    assert "widen the search with --regions or --no-placement-group, or choose" in error.hint
    assert account.faults.count("RunInstances") == len(G5_ZONES)
    assert account.listed() == []


def test_quota_stops_at_once(account: Account) -> None:
    """The vCPU quota is that of the region: another zone does not help."""
    account.conditions(quota={"on-demand-g": 4})
    error = account.failed_up()
    assert "AWS refused ec2:RunInstances: VcpuLimitExceeded" in error.message
    quota = r"G and VT instances \(L-DB2E81BA\): 4 vCPUs, \d+ in use, 8 needed"
    assert re.search(quota, text(error)), text(error)
    request = "aws service-quotas request-service-quota-increase --region us-east-1 --service-code ec2"
    assert f"`{request} --quota-code L-DB2E81BA --desired-value " in error.hint
    assert account.faults.count("RunInstances") == 1
    denied = {"code": "AccessDeniedException", "status": 400, "calls": 9}
    account.conditions(reject={"GetServiceQuota": denied})
    error = account.failed_up()
    assert (
        "in the Service Quotas console, or use fewer nodes; `cloudddp doctor` names the quota" in error.hint
    )
    assert account.listed() == []


def test_wait_shows_its_end_and_leaves_nothing_if_interrupted(
    cli: Any, conditions: Any, remains: Any
) -> None:
    """Between two attempts the account has nothing of the cluster: the computer may be switched off."""
    conditions(capacity=full("us-east-1a"))
    process = cli.start("up", "-n", "1", "--zones", "us-east-1a", "--wait-capacity", "14d")
    shown = lines_until(process.stderr, "next attempt")
    assert remains().nothing
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
    err = cli.messages("down", "-y")
    assert err.count("using region us-west-2") == 1
    assert remaining(other_region, cli.cluster).nothing


def test_interrupted_run_removes_its_cluster_in_the_region_that_was_tried_next(
    cli: Any, conditions: Any, simulator: Any, other_region: Any
) -> None:
    """Also at the moment at which it is up, and where this computer knows of another region with the name."""
    cli.env.update(CLOUDDDP_PRICE="1", CLOUDDDP_NODES="1")
    third = client_of(simulator, "ec2", region_name="eu-west-1")
    cli.ok("up", "--region", "eu-west-1")
    third.terminate_instances(InstanceIds=instances_of(third, cli.cluster))
    wait_for(lambda: not instances_of(third, cli.cluster), "the first cluster has ended")
    conditions(capacity=full(*G5_ZONES))
    words = ("run", "--regions", "us-east-1,us-west-2", "ok.py")
    cli.write("ok.py", "")
    _, err = interrupted_at(cli, "cli.actions.run:bring_up", *words)
    assert "1 node terminated" in err
    assert remaining(other_region, cli.cluster).nothing
    cli.ok("down", "-y", "--region", "eu-west-1")


def test_no_region_offers_the_type(account: Account) -> None:
    clouds = [AWS(region="eu-west-3"), AWS(region="af-south-1")]
    one = account.failed_up(clouds[:1], instance_type="p4d.24xlarge", price=30)
    assert one.exit_code == 2
    assert "eu-west-3 does not offer p4d.24xlarge" in one.message
    both = account.failed_up(clouds, instance_type="p4d.24xlarge", price=30)
    assert both.exit_code == 1
    assert re.search(r"^  eu-west-3 .*does not offer", both.message, re.MULTILINE)
    assert re.search(r"^  af-south-1 .*does not offer", both.message, re.MULTILINE)
    assert not {"RunInstances", "ImportKeyPair"} & set(account.faults.calls)


@pytest.mark.parametrize(
    ("action", "code", "reason"),
    [
        ("RunInstances (dry run)", "UnauthorizedOperation", "AWS denied ec2:RunInstances"),
        ("RunInstances", "VcpuLimitExceeded", "injected by the test"),
    ],
)
def test_refusal_of_one_region_leads_to_the_next(
    account: Account, action: str, code: str, reason: str
) -> None:
    """Policies and quotas belong to a region."""
    account.faults.fail(action, code, times=2, status=403)
    error = account.failed_up([account.aws, AWS(region="us-west-2")], nodes=1, price=1)
    assert account.faults.count(action) == 2
    for region in ("us-east-1", "us-west-2"):
        assert re.search(rf"^  {region}a?  {code}  {reason}", error.message, re.MULTILINE), error.message
    assert account.listed() == []


# -- waiting: what it costs, and what ends it ----------------------------------------------------------------


def test_accepted_launches_that_end_are_limited_and_count_against_max_cost(
    account: Account, limits: Callable[..., None]
) -> None:
    """Each is billed for at least 60 s per node."""
    limits()
    wait: dict[str, Any] = {"zones": ("us-east-1a",), "wait_capacity": "1h"}
    ended = {"code": "Server.InternalError", "instances": 1, "launches": 999}
    account.conditions(fail_launch={"us-east-1a": ended}, prices={"g5.xlarge": 60.0})
    error = account.failed_up(**wait)
    assert account.faults.count("RunInstances") == 3
    assert "3 launches that AWS accepted ended before the nodes were ready" in error.message
    assert any(re.search(r"cost so far at most \$2\.0\d", one) for one in account.progress), account.progress
    assert re.search(r"cost at most \$6\.\d\d", error.message), error.message
    account.faults.calls.clear()
    ended["code"] = "Server.InsufficientInstanceCapacity"
    account.conditions(fail_launch={"us-east-1a": ended})
    error = account.failed_up(nodes=1, max_cost=13, **wait)
    # 60 s cost $1, and the shortest lifetime of 10 minutes $10.
    assert account.faults.count("RunInstances") == 3
    assert "max_cost" in error.message
    assert account.listed() == []


def test_what_changes_while_waiting(account: Account, limits: Callable[..., None]) -> None:
    """An outage of AWS does not end the wait. The address of the computer is looked up again: a laptop that
    is taken to another network would create nodes that it cannot reach. A price that has risen ends the
    wait."""
    limits(refresh_interval=1.0)
    account.conditions(capacity=full("us-east-1a"), prices={"g5.xlarge": 1.0})
    admitted: list[str] = []
    waits: list[str] = []

    def observe(_: str, method: str, parameters: Any, *__: Any) -> None:
        if method == "authorize_security_group_ingress":
            admitted.extend(re.findall(r"127\.0\.0\.\d+/32", str(parameters)))

    def progress(line: str) -> None:
        if "next attempt" not in line:
            return
        assert account.listed() == []
        waits.append(line)
        if len(waits) == 1:
            account.faults.fail("ImportKeyPair", "Unavailable", times=5, status=503)
        if len(waits) == 2:
            account.faults.lose_answer("ImportKeyPair", times=5)
        if "127.0.0.2/32" in admitted:
            account.conditions(prices={"g5.xlarge": 2.0})

    sources = iter(["127.0.0.1/32"])
    options = {"progress": progress, "ssh_sources": lambda *_: (next(sources, "127.0.0.2/32"),)}
    cloud = AWS(region=account.aws.region, observe=observe)
    error = account.failed_up([cloud], options=options, nodes=1, zones=("us-east-1a",), wait_capacity="1h")
    assert re.search(r"the price in us-east-1 has risen from \$1\.\d\d to \$2\.\d\d an hour", error.message)
    assert ["AWS does not answer as usual" in one for one in waits[:4]] == [False, True, True, False]
    assert "127.0.0.1/32" in admitted
    assert account.listed() == []

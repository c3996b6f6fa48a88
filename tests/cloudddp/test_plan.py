"""The exact requests that make a cluster, its deadline and its price: all of it decided before AWS is called."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudddp import __version__, payload, prices
from cloudddp.errors import UsageError
from cloudddp.plan import (
    BOOT_CHECK,
    SERVICE,
    TIMER,
    USER_DATA_LIMIT,
    Identity,
    Place,
    Plan,
    Ref,
    client_token,
    lifetime,
    plan,
)
from cloudddp.prices import Price
from cloudddp.spec import ClusterSpec
from cloudddp.ssh import keys
from cloudddp.tags import iso, moment

NOW = datetime(2026, 11, 20, 12, 0, 0, 654321, tzinfo=UTC)
UNITS = (
    payload.text("infra/node/cloudddp-deadline.timer"),
    payload.text("infra/node/cloudddp-deadline.service"),
)
PLACE = Place(
    image_id="ami-0abc",
    root_device="/dev/sda1",
    image_disk_gb=45,
    vpc_id="vpc-0abc",
    subnet_id="subnet-0abc",
    zone="us-east-1a",
    ssh_from=("203.0.113.7/32",),
    owner="me",
    now=NOW,
)
HOST_KEY = keys.generate()
IDENTITY = Identity("c-1234", "ssh-ed25519 AAAAlogin", HOST_KEY.private, HOST_KEY.public)
DOLLAR = Price(node_hour=1.0, nodes=2, disk_gb=0, source="given")
GROUP = Ref("security-group", "GroupId")


def planned(spec: ClusterSpec | None = None, *, place: Place = PLACE, identity: Identity = IDENTITY) -> Plan:
    return plan(spec or ClusterSpec(), place, identity, DOLLAR, units=UNITS)


def params(made: Plan, step: str) -> Any:
    (found,) = [request.params for request in made.requests if request.step == step]
    return found


def refs(value: Any) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from refs(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from refs(inner)


def config_of(made: Plan) -> Any:
    text = params(made, "nodes")["UserData"]
    assert text.startswith("#cloud-config\n")
    return yaml.safe_load(text)


# -- requests --------------------------------------------------------------------------------------------------


def test_everything_is_made_in_an_order_in_which_each_answer_is_there_before_it_is_needed() -> None:
    made = planned()
    assert [request.method for request in made.requests] == [
        "import_key_pair",
        "create_security_group",
        "authorize_security_group_ingress",
        "authorize_security_group_egress",
        "run_instances",
    ]
    seen: set[str] = set()
    used: list[str] = []
    for request in made.requests:
        for ref in refs(request.params):
            used.append(request.step)
            assert ref == GROUP
            assert ref.step in seen
        seen.add(request.step)
    assert used == ["ingress-rules"] * 2 + ["egress-rules"] * 2 + ["nodes"]


def test_the_nodes_may_talk_to_each_other_in_and_out_and_only_the_caller_may_use_ssh() -> None:
    made = planned()
    itself = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": GROUP}]}
    caller = {
        "IpProtocol": "tcp",
        "FromPort": 22,
        "ToPort": 22,
        "IpRanges": [{"CidrIp": "203.0.113.7/32", "Description": "cloudddp caller"}],
    }
    assert params(made, "ingress-rules") == {"GroupId": GROUP, "IpPermissions": [itself, caller]}
    assert params(made, "egress-rules") == {"GroupId": GROUP, "IpPermissions": [itself]}


def test_ssh_rules_are_made_for_old_and_new_addresses_and_the_chosen_port() -> None:
    place = replace(PLACE, ssh_from=("203.0.113.7/32", "2001:db8::7/128"))
    rules = params(planned(ClusterSpec(ssh_port=2222), place=place), "ingress-rules")["IpPermissions"][1:]
    assert [(rule["FromPort"], rule["ToPort"]) for rule in rules] == [(2222, 2222)] * 2
    assert rules[0]["IpRanges"][0]["CidrIp"] == "203.0.113.7/32"
    assert "Ipv6Ranges" not in rules[0]
    assert rules[1]["Ipv6Ranges"][0]["CidrIpv6"] == "2001:db8::7/128"
    assert "IpRanges" not in rules[1]


@pytest.mark.parametrize("spot", [False, True])
def test_everything_is_tagged_in_the_call_that_creates_it(spot: bool) -> None:
    made = planned(ClusterSpec(name="demo", max_hours=2.0, spot=spot))
    tags = {
        "cloudddp:cluster": "demo",
        "cloudddp:cluster-id": "c-1234",
        "cloudddp:owner": "me",
        "cloudddp:created": "2026-11-20T12:00:00Z",
        "cloudddp:expires": "2026-11-20T14:00:00Z",
        "cloudddp:version": __version__,
        "cloudddp:nodes": "2",
        "cloudddp:usd-per-node-hour": f"{made.price.hour / 2:.4f}",
        "Name": "cloudddp-demo",
    }
    of_nodes = {"instance", "volume", "network-interface"} | ({"spot-instances-request"} if spot else set())
    kinds = {"key-pair": {"key-pair"}, "security-group": {"security-group"}, "nodes": of_nodes}
    for step, expected in kinds.items():
        given = params(made, step)["TagSpecifications"]
        assert {one["ResourceType"] for one in given} == expected
        for one in given:
            assert {tag["Key"]: tag["Value"] for tag in one["Tags"]} == tags
    assert {request.step for request in made.requests} - set(kinds) == {"ingress-rules", "egress-rules"}


def test_all_nodes_come_or_none() -> None:
    nodes = params(planned(ClusterSpec(nodes=7)), "nodes")
    assert (nodes["MinCount"], nodes["MaxCount"]) == (7, 7)


def test_nodes_are_closed_to_metadata_thieves_encrypted_and_end_for_good() -> None:
    nodes = params(planned(ClusterSpec(disk_gb=200)), "nodes")
    assert nodes["MetadataOptions"]["HttpTokens"] == "required"
    assert nodes["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
    assert nodes["InstanceInitiatedShutdownBehavior"] == "terminate"
    (disk,) = nodes["BlockDeviceMappings"]
    assert disk == {
        "DeviceName": "/dev/sda1",
        "Ebs": {"VolumeSize": 200, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True},
    }
    (card,) = nodes["NetworkInterfaces"]
    assert card["DeleteOnTermination"] is True
    assert (card["SubnetId"], card["AssociatePublicIpAddress"]) == ("subnet-0abc", True)
    assert card["Groups"] == [GROUP]


def test_nodes_are_made_of_the_image_type_and_key_that_were_chosen() -> None:
    made = planned(ClusterSpec(instance_type="p5.48xlarge"))
    nodes = params(made, "nodes")
    assert (nodes["ImageId"], nodes["InstanceType"]) == ("ami-0abc", "p5.48xlarge")
    assert nodes["KeyName"] == params(made, "key-pair")["KeyName"]
    assert params(made, "security-group")["VpcId"] == "vpc-0abc"


def test_the_disk_is_never_smaller_than_the_image_needs() -> None:
    nodes = params(planned(ClusterSpec(disk_gb=8)), "nodes")
    assert nodes["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 45


def test_spot_nodes_are_asked_for_once_and_end_when_interrupted() -> None:
    assert "InstanceMarketOptions" not in params(planned(), "nodes")
    assert params(planned(ClusterSpec(spot=True)), "nodes")["InstanceMarketOptions"] == {
        "MarketType": "spot",
        "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
    }


def test_the_login_key_is_public_and_the_private_host_key_is_in_the_user_data_alone() -> None:
    made = planned()
    assert params(made, "key-pair")["PublicKeyMaterial"] == b"ssh-ed25519 AAAAlogin"
    secret = HOST_KEY.private.splitlines()[2]
    holders = [
        (request.step, key)
        for request in made.requests
        for key, value in request.params.items()
        if secret in repr(value)
    ]
    assert holders == [("nodes", "UserData")]


# -- the token -------------------------------------------------------------------------------------------------


def test_the_same_request_has_the_same_token_and_a_legal_one() -> None:
    token = params(planned(), "nodes")["ClientToken"]
    assert token == params(planned(), "nodes")["ClientToken"]
    assert token.isascii()
    assert len(token) <= 64


def test_the_token_differs_by_cluster_attempt_zone_and_request() -> None:
    tokens = [
        client_token("c-1", 1, "us-east-1a", {"MinCount": 1}),
        client_token("c-2", 1, "us-east-1a", {"MinCount": 1}),
        client_token("c-1", 2, "us-east-1a", {"MinCount": 1}),
        client_token("c-1", 1, "us-east-1b", {"MinCount": 1}),
        client_token("c-1", 1, "us-east-1a", {"MinCount": 2}),
    ]
    assert len(set(tokens)) == 5
    assert tokens[0] == client_token("c-1", 1, "us-east-1a", {"MinCount": 1})


def test_a_plan_for_another_zone_or_cluster_has_another_token() -> None:
    first = params(planned(), "nodes")["ClientToken"]
    assert params(planned(place=replace(PLACE, zone="us-east-1b")), "nodes")["ClientToken"] != first
    assert params(planned(identity=replace(IDENTITY, cluster_id="c-9")), "nodes")["ClientToken"] != first


# -- user data -------------------------------------------------------------------------------------------------


def test_the_user_data_is_a_cloud_config_with_the_host_key_and_the_deadline() -> None:
    config = config_of(planned(ClusterSpec(max_hours=2.0)))
    assert config["ssh_deletekeys"] is True
    assert config["ssh_keys"] == {"ed25519_private": HOST_KEY.private, "ed25519_public": HOST_KEY.public}
    files = {file["path"]: file["content"] for file in config["write_files"]}
    assert set(files) == {TIMER, SERVICE, BOOT_CHECK}
    assert "OnCalendar=2026-11-20 14:00:00 UTC\n" in files[TIMER]
    assert files[SERVICE] == UNITS[1]
    assert config["runcmd"][1] == ["systemctl", "enable", "--now", TIMER.rsplit("/", 1)[1]]


@pytest.mark.parametrize(("hours", "ended"), [(-1.0, True), (1.0, False)])
def test_a_node_that_boots_after_its_deadline_ends_at_once(tmp_path: Path, hours: float, ended: bool) -> None:
    """What the user data has run at every boot, run for real with a systemctl that writes down what it is told."""
    now = datetime.now(UTC) + timedelta(hours=hours) - timedelta(hours=2)
    config = config_of(planned(ClusterSpec(max_hours=2.0), place=replace(PLACE, now=now)))
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/told\n')
    (tmp_path / "systemctl").chmod(0o755)
    (script,) = [file for file in config["write_files"] if file["path"] == BOOT_CHECK]
    assert (script["permissions"], config["runcmd"][-1]) == ("0755", ["sh", BOOT_CHECK])
    (tmp_path / "check").write_text(script["content"])
    subprocess.run(
        ["sh", tmp_path / "check"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True, timeout=30
    )
    assert (tmp_path / "told").exists() == ended
    if ended:
        assert (tmp_path / "told").read_text() == "start --no-block cloudddp-deadline.service\n"


def test_no_placeholder_is_left_in_the_user_data() -> None:
    assert "@DEADLINE@" in UNITS[0]
    assert "@" not in "".join(file["content"] for file in config_of(planned())["write_files"])


def test_the_deadline_on_the_node_is_the_one_in_the_tags() -> None:
    made = planned(ClusterSpec(max_hours=3.0, max_cost=1.0))
    timer = next(file["content"] for file in config_of(made)["write_files"] if file["path"] == TIMER)
    (line,) = [line for line in timer.splitlines() if line.startswith("OnCalendar=")]
    armed = datetime.strptime(line, "OnCalendar=%Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC)
    assert armed == made.expires < NOW + timedelta(hours=1)


def test_the_user_data_fits_with_room_to_spare() -> None:
    assert len(params(planned(), "nodes")["UserData"].encode()) < USER_DATA_LIMIT / 2


def test_user_data_over_the_limit_of_ec2_is_refused() -> None:
    with pytest.raises(UsageError, match="16384"):
        plan(ClusterSpec(), PLACE, IDENTITY, DOLLAR, units=(UNITS[0], "#" * USER_DATA_LIMIT))


# -- the deadline ----------------------------------------------------------------------------------------------


def test_the_cluster_ends_after_max_hours() -> None:
    made = planned(ClusterSpec(max_hours=1.5))
    assert made.created == NOW.replace(microsecond=0)
    assert made.expires - made.created == timedelta(hours=1.5)
    assert made.hours == 1.5


def test_a_cost_cap_becomes_an_earlier_deadline_that_the_cost_does_not_pass() -> None:
    made = planned(ClusterSpec(max_hours=8.0, max_cost=3.0))
    assert made.hours < 1.5
    assert 2.99 < made.cost <= 3.0


def test_a_generous_cost_cap_does_not_lengthen_max_hours() -> None:
    assert lifetime(ClusterSpec(max_hours=1.0, max_cost=1e6), DOLLAR) == timedelta(hours=1)


@pytest.mark.parametrize("spec", [ClusterSpec(max_hours=0.16), ClusterSpec(max_cost=0.3)])
def test_a_life_too_short_to_boot_in_is_refused(spec: ClusterSpec) -> None:
    with pytest.raises(UsageError, match="minutes after its start"):
        lifetime(spec, DOLLAR)


@pytest.mark.parametrize("node_hour", [1.0, 0.526, 1.006, 21.958, 0.0131, 113.933])
def test_what_the_refusal_advises_is_enough(node_hour: float) -> None:
    price = Price(node_hour=node_hour, nodes=2, disk_gb=150, source="given")
    with pytest.raises(UsageError) as caught:
        lifetime(ClusterSpec(max_cost=price.hour / 10), price)
    advised = float(caught.value.hint.split("$")[1].split()[0])
    assert lifetime(ClusterSpec(max_cost=advised, max_hours=0.17), price) >= timedelta(minutes=10)


def test_moments_survive_the_tags() -> None:
    assert moment(iso(NOW)) == NOW.replace(microsecond=0)
    assert iso(NOW.astimezone(timezone(timedelta(hours=5)))) == iso(NOW)


@pytest.mark.parametrize("text", ["", "soon", "2026-13-01T00:00:00Z"])
def test_a_tag_that_names_no_moment_gives_none(text: str) -> None:
    assert moment(text) is None


# -- the price -------------------------------------------------------------------------------------------------


def test_a_price_is_known_for_its_own_region_alone_and_never_guessed() -> None:
    assert prices.node_hour("g5.xlarge", "us-east-1") == 1.006
    assert prices.node_hour("g5.xlarge", "eu-west-1") is None
    assert prices.node_hour("g5.nonsense", "us-east-1") is None


def test_no_price_of_the_table_is_zero() -> None:
    assert all(price > 0 for price in prices.US_EAST_1.values())


def test_the_hour_counts_nodes_disks_and_addresses() -> None:
    price = Price(node_hour=2.0, nodes=3, disk_gb=730, source="given")
    assert price.extras_hour == pytest.approx(3 * (0.08 + 0.005))
    assert price.hour == pytest.approx(6.0 + 3 * 0.085)

"""The exact requests of `up`, for six instance types, for two of them in five other accounts, and for a type
without GPU, are those in tests/golden/requests.

A change shows as a diff, a call on each line. After one that is wanted:
UPDATE_GOLDEN=1 python -m pytest tests/unit/test_golden_requests.py
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator
from support.networks import Vpc

from cloudddp.aws.client import AWS
from cloudddp.cli.actions.rehearsal import PrintingRunner
from cloudddp.cluster import up
from cloudddp.cluster.connect import Reach
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.simulator.aws import rehearse

FOLDER = Path(__file__).resolve().parents[1] / "golden/requests"
ONE_CARD, SEVERAL_CARDS = "g5.xlarge", "p4d.24xlarge"
TYPES = (SEVERAL_CARDS, "p5.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge", "g6e.12xlarge", ONE_CARD)
ID = re.compile(r"\b(vpc|subnet|sg|ami|key|i|rtb|c|pg|cr|eipalloc|eni)-[0-9a-f]{8,32}\b")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
HIDDEN = {"UserData": "<user data>", "ClientToken": "<token>", "PublicKeyMaterial": "<public key>"}
ZONES = ("us-east-1c", "us-east-1a")


def custom_vpc(aws: Any) -> dict[str, Any]:
    """A VPC with public subnets, found by tags."""
    vpc(aws, Name="training").open()
    return {"vpc": "tag:Name=training", "subnets": ("tag:Use=nodes",)}


def private_subnets(aws: Any) -> dict[str, Any]:
    """A VPC without an internet gateway, reached by Session Manager."""
    command = (
        "aws ssm start-session --target %h --document-name AWS-StartSSHSession --parameters portNumber=%p"
    )
    return {"vpc": vpc(aws).id, "proxy_command": command, "instance_profile": "nodes"}


def vpc(aws: Any, **tags: str) -> Vpc:
    made = Vpc(aws.client("ec2"), "10.20.0.0/16", **tags)
    for number, zone in enumerate(ZONES):
        made.subnet(f"10.20.{number}.0/24", zone, Use="nodes")
    return made


def organization(_: Any) -> dict[str, Any]:
    """An account whose organization requires tags and a key of its own. Its volumes are initialized at a
    rate."""
    return {
        "tags": {"CostCenter": "4711", "Team": "vision"},
        "kms_key": "alias/training",
        "instance_profile": "nodes",
        "imds_hop_limit": 2,
        "volume_init_rate": 200,
    }


def reserved(aws: Any, instance_type: str) -> dict[str, Any]:
    """An on-demand capacity reservation of exactly these nodes."""
    offered = aws.client("ec2").describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [instance_type]}]
    )["InstanceTypeOfferings"]
    answer = aws.client("ec2").create_capacity_reservation(
        InstanceType=instance_type,
        InstancePlatform="Linux/UNIX",
        AvailabilityZone=min(one["Location"] for one in offered),
        InstanceCount=2,
        InstanceMatchCriteria="targeted",
    )
    return {"reservation": answer["CapacityReservation"]["CapacityReservationId"]}


ACCOUNTS: dict[str, Callable[[Any, str], dict[str, Any]]] = {
    "default": lambda *_: {},
    "custom-vpc": lambda aws, _: custom_vpc(aws),
    "private": lambda aws, _: private_subnets(aws),
    "organization": lambda aws, _: organization(aws),
    "spot": lambda *_: {"spot": True},
    "reservation": reserved,
    "cpu": lambda *_: {"allow_cpu": True, "price": 0.09},
}
CASES = [
    *[(name, SEVERAL_CARDS) for name in list(ACCOUNTS)[:-1]],
    ("default", ONE_CARD),
    ("cpu", "t3.large"),  # with CPU credits
]
OTHERS = [*[("default", name) for name in TYPES[1:-1]], *[(name, ONE_CARD) for name in list(ACCOUNTS)[1:-1]]]


def requests(instance_type: str, prepare: Callable[[Any, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every request of `up`, in order: the operation and its parameters.

    `prepare` is called with AWS before, creates what the account has, and returns settings that name it.
    """
    calls: list[tuple[str, str, Mapping[str, Any]]] = []
    with rehearse("nodes"):
        aws = AWS(
            region="us-east-1",
            observe=lambda service, method, params, _: calls.append((service, method, params)),
        )
        settings = prepare(aws, instance_type)
        calls.clear()
        up.up(
            [aws],
            replace(ClusterSpec(name="golden", instance_type=instance_type), **settings),
            up.Callbacks(lambda _: None),
            reach=Reach(
                lambda found, *_: PrintingRunner(found, gpus=found.gpus or 0, cpus=8),
                lambda _: None,
                lambda *_: ("203.0.113.7/32",),
            ),
        )
        operations = [
            f"{service} {aws.client(service).meta.method_to_api_mapping[method]}"
            for service, method, _ in calls
        ]
    names = Names()
    return [
        {"call": operation, "params": names.replace(params)}
        for operation, (_, _, params) in zip(operations, calls, strict=True)
    ]


class Names:
    """Replaces ids by their order of appearance, and times, keys and tokens by what they are."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def replace(self, value: Any, key: str = "") -> Any:
        if key in HIDDEN:
            return HIDDEN[key]
        if isinstance(value, Mapping):
            if value.get("Key") == "cloudddp:price":
                return {"Key": "cloudddp:price", "Value": "<price>"}
            return {name: self.replace(item, name) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.replace(item) for item in value]
        if isinstance(value, datetime):
            return "<time>"
        return TIME.sub("<time>", ID.sub(self._name, value)) if isinstance(value, str) else value

    def _name(self, found: re.Match[str]) -> str:
        count = sum(known.startswith(f"{found[1]}-") for known in self._known.values())
        return self._known.setdefault(found[0], f"{found[1]}-{count + 1:08}")


def invalid(call: Mapping[str, Any]) -> str:
    """Return what botocore's service model objects to in one request, or ''."""
    shape = model(call["call"].split()[0]).operation_model(call["call"].split()[1]).input_shape
    params = {name: datetime.now() if value == "<time>" else value for name, value in call["params"].items()}
    if "PublicKeyMaterial" in params:
        params["PublicKeyMaterial"] = b"key"
    return str(ParamValidator().validate(params, shape).generate_report())


@functools.cache
def model(service: str) -> Any:
    return botocore.session.get_session().get_service_model(service)


@pytest.mark.parametrize(("account", "instance_type"), CASES)
def test_requests_are_those_of_the_golden_file(
    account: str, instance_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDDDP_HOME", str(tmp_path))
    found = requests(instance_type, ACCOUNTS[account])
    assert [text for call in found if (text := invalid(call))] == []
    path = FOLDER / account / f"{instance_type}.jsonl"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text("".join(f"{json.dumps(call)}\n" for call in found))
    assert found == [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("account", "instance_type"), OTHERS)
def test_requests_of_other_types_are_those_of_the_golden_file(
    account: str, instance_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_requests_are_those_of_the_golden_file(account, instance_type, tmp_path, monkeypatch)


def test_no_golden_file_is_left_over() -> None:
    files = (path for path in FOLDER.rglob("*") if path.is_file())
    expected = {f"{account}/{instance_type}.jsonl" for account, instance_type in (*CASES, *OTHERS)}
    assert {str(path.relative_to(FOLDER)) for path in files} == expected


def test_invalid_request_is_reported() -> None:
    assert "Unknown parameter" in invalid({"call": "ec2 RunInstances", "params": {"ImageID": "ami-0"}})

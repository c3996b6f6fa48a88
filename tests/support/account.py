"""An account for tests of EC2's rules with plain boto3: the simulator's over HTTP, or AWS in process."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError
from support.harness import until
from support.simlab import IMAGE_PARAMETER

LIVE = ("pending", "running", "shutting-down", "stopping", "stopped")


@dataclass
class Refusal:
    """The error of a rejected call; empty until the block has ended."""

    code: str = ""
    message: str = ""
    status: int = 0
    retries: int = 0
    date: datetime | None = None  # the time of the response


@contextlib.contextmanager
def refused(code: str) -> Iterator[Refusal]:
    """Expect the call in the block to fail with this error code."""
    refusal = Refusal()
    with pytest.raises(ClientError) as error:
        yield refusal
    answer = error.value.response
    refusal.code, refusal.message = answer["Error"]["Code"], answer["Error"]["Message"]
    refusal.status = answer["ResponseMetadata"]["HTTPStatusCode"]
    if date := answer["ResponseMetadata"].get("HTTPHeaders", {}).get("date"):
        refusal.date = parsedate_to_datetime(date)
    refusal.retries = answer["ResponseMetadata"].get("RetryAttempts", 0)
    assert refusal.code == code, refusal.message


@dataclass
class Account:
    client: Callable[..., Any]
    set_conditions: Callable[[dict[str, Any]], dict[str, Any]]
    image: str = ""
    ec2: Any = None

    def __post_init__(self) -> None:
        self.ec2 = self.client("ec2")
        self.image = self.client("ssm").get_parameter(Name=IMAGE_PARAMETER)["Parameter"]["Value"]

    def launch(self, count: int = 1, **more: Any) -> list[dict[str, Any]]:
        request = {"ImageId": self.image, "InstanceType": "g5.xlarge", "MinCount": count, "MaxCount": count}
        return self.ec2.run_instances(**{**request, **more})["Instances"]

    def running(self, count: int = 1, **more: Any) -> list[dict[str, Any]]:
        """Launch instances, and return them when they are running."""
        ids = [instance["InstanceId"] for instance in self.launch(count, **more)]
        until(lambda: {self.describe(one)["State"]["Name"] for one in ids} == {"running"})
        return [self.describe(one) for one in ids]

    def describe(self, instance_id: str) -> dict[str, Any]:
        return self.ec2.describe_instances(InstanceIds=[instance_id])["Reservations"][0]["Instances"][0]

    def instances(self, **filters: str) -> list[dict[str, Any]]:
        """Return the instances that are not terminated. In filter names, `_` stands for `-` and `__` for
        `.`."""
        wanted = [
            {"Name": name.replace("__", ".").replace("_", "-"), "Values": [value]}
            for name, value in filters.items()
        ]
        wanted.append({"Name": "instance-state-name", "Values": list(LIVE)})
        answer = self.ec2.describe_instances(Filters=wanted)
        return [instance for part in answer["Reservations"] for instance in part["Instances"]]

    def end(self, *ids: str) -> None:
        self.ec2.terminate_instances(InstanceIds=list(ids))
        until(lambda: {self.describe(one)["State"]["Name"] for one in ids} == {"terminated"})

    def conditions(self, **body: Any) -> dict[str, Any]:
        return self.set_conditions(body)

    def subnet(self, zone: str) -> str:
        wanted = [
            {"Name": "availability-zone", "Values": [zone]},
            {"Name": "default-for-az", "Values": ["true"]},
        ]
        return self.ec2.describe_subnets(Filters=wanted)["Subnets"][0]["SubnetId"]

    def leave(self) -> None:
        self.set_conditions({"clear": True})
        if ids := [instance["InstanceId"] for instance in self.instances()]:
            for one in ids:
                self.ec2.modify_instance_attribute(InstanceId=one, DisableApiTermination={"Value": False})
            self.end(*ids)
        for group in self.ec2.describe_placement_groups()["PlacementGroups"]:
            self.ec2.delete_placement_group(GroupName=group["GroupName"])
        for address in self.ec2.describe_addresses()["Addresses"]:
            self.ec2.release_address(AllocationId=address["AllocationId"])
        for interface in self.ec2.describe_network_interfaces()["NetworkInterfaces"]:
            self.ec2.delete_network_interface(NetworkInterfaceId=interface["NetworkInterfaceId"])


def post_conditions(endpoint: str, body: Any) -> tuple[int, dict[str, Any]]:
    """Set conditions. Returns HTTP status and JSON response."""
    request = urllib.request.Request(
        f"{endpoint}/_cloudddp/conditions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)

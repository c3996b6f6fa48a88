"""An account with the resources of one cluster, for tests of `up` and `down` in this process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from support.account import post_conditions
from support.faults import FaultyEndpoint
from support.simlab import IMAGE_PARAMETER, client_of

from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance, Resource
from cloudddp.cli.actions.rehearsal import PrintingRunner
from cloudddp.cluster import teardown, up
from cloudddp.cluster.connect import Reach
from cloudddp.cluster.teardown import DownReport
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.errors import CloudDDPError
from cloudddp.local_state import ClusterFolder, ClusterRecord
from cloudddp.simulator import control

_NUMBERS = itertools.count(1)


def _connect(found: Any, *_: Any) -> Any:
    return PrintingRunner(found, gpus=found.gpus or 0, cpus=48)


class Account:
    """One cluster's name in the account, plain boto3 to fill it, and `down` through an endpoint with
    faults."""

    def __init__(self, sim: control.Simulator, faults: FaultyEndpoint, aws: AWS) -> None:
        self.ec2 = client_of(sim, "ec2")
        self.image = client_of(sim, "ssm").get_parameter(Name=IMAGE_PARAMETER)["Parameter"]["Value"]
        self.faults, self.aws, self.sim = faults, aws, sim
        number = next(_NUMBERS)
        self.name, self.cluster_id = f"teardown-{number}", f"c-{number:010x}"
        self.progress: list[str] = []

    def tags(self, kind: str, tags: dict[str, str] | None = None) -> list[dict[str, Any]]:
        """Return tags for a Create call; without `tags`, those of the cluster."""
        own = {"cluster": self.name, "cluster-id": self.cluster_id, "usd-per-node-hour": "1.50"}
        own = {f"cloudddp:{name}": value for name, value in own.items()}
        pairs = [{"Key": key, "Value": value} for key, value in (own if tags is None else tags).items()]
        return [{"ResourceType": kind, "Tags": pairs}] if pairs else []

    def conditions(self, **body: Any) -> None:
        status, answer = post_conditions(self.sim.endpoint, body)
        assert status == 200, answer

    def spec(self, **settings: Any) -> ClusterSpec:
        return ClusterSpec(**{"name": self.name, **settings})

    def up(self, clouds: Sequence[AWS] = (), *, options: Any = None, **settings: Any) -> list[str]:
        """Create the cluster, whose nodes answer at once; return the ids of its instances."""
        calls = {"progress": self.progress.append, **(options or {})}
        sources = calls.pop("ssh_sources", lambda *_: ("127.0.0.1/32",))
        result = up.up(
            clouds or [self.aws],
            self.spec(**settings),
            up.Callbacks(**calls),
            reach=Reach(_connect, lambda _: None, sources),
        )
        return [node.id for node in result.cluster.nodes.values()]

    def failed_up(self, *given: Any, **settings: Any) -> CloudDDPError:
        """Return the error of an `up`. Its text has the message and the hint on one line."""
        with pytest.raises(CloudDDPError) as caught:
            self.up(*given, **settings)
        return caught.value

    def launch(self, count: int = 1, *, tags: dict[str, str] | None = None, **more: Any) -> list[str]:
        answer = self.ec2.run_instances(
            ImageId=self.image,
            **{"InstanceType": "g5.xlarge", **more},
            MinCount=count,
            MaxCount=count,
            TagSpecifications=self.tags("instance", tags),
        )
        return [instance["InstanceId"] for instance in answer["Instances"]]

    def group(self) -> str:
        created = self.ec2.create_security_group(
            GroupName=f"{self.name}-{next(_NUMBERS)}",
            Description="-",
            TagSpecifications=self.tags("security-group"),
        )
        return created["GroupId"]

    def key(self, **tags: str) -> str:
        given = self.tags("key-pair", tags or None)
        return self.ec2.create_key_pair(KeyName=f"{self.name}-{next(_NUMBERS)}", TagSpecifications=given)[
            "KeyPairId"
        ]

    def volume(self) -> str:
        created = self.ec2.create_volume(
            AvailabilityZone="us-east-1a", Size=8, TagSpecifications=self.tags("volume")
        )
        return created["VolumeId"]

    def interface(self) -> str:
        subnet = self.ec2.describe_subnets()["Subnets"][0]["SubnetId"]
        created = self.ec2.create_network_interface(
            SubnetId=subnet, TagSpecifications=self.tags("network-interface")
        )
        return created["NetworkInterface"]["NetworkInterfaceId"]

    def elastic_ip(self) -> str:
        created = self.ec2.allocate_address(Domain="vpc", TagSpecifications=self.tags("elastic-ip"))
        return created["AllocationId"]

    def placement_group(self) -> str:
        created = self.ec2.create_placement_group(
            GroupName=f"{self.name}-{next(_NUMBERS)}", TagSpecifications=self.tags("placement-group")
        )
        return created["PlacementGroup"]["GroupId"]

    def down(self, **options: Any) -> DownReport:
        self.faults.calls.clear()
        return teardown.down(self.aws, inventory.named(self.name), progress=self.progress.append, **options)

    def show_as_shutting_down(self, times: int) -> None:
        """Have so many listings show terminated instances as shutting down."""

        def change(body: bytes) -> bytes:
            ended = self.faults.count("DescribeInstances") > times
            return body if ended else body.replace(b"<name>terminated<", b"<name>shutting-down<")

        self.faults.rewrite("DescribeInstances", change)

    def state(self, instance: str) -> str:
        found = self.ec2.describe_instances(InstanceIds=[instance])["Reservations"]
        return found[0]["Instances"][0]["State"]["Name"]

    def listed(self) -> list[str]:
        """Return the ids of everything with the cluster's name, except terminated instances."""
        where = [{"Name": "tag:cloudddp:cluster", "Values": [self.name]}]
        found = [
            i for r in self.ec2.describe_instances(Filters=where)["Reservations"] for i in r["Instances"]
        ]
        ids = [i["InstanceId"] for i in found if i["State"]["Name"] != "terminated"]
        ids += [one["GroupId"] for one in self.ec2.describe_security_groups(Filters=where)["SecurityGroups"]]
        ids += [one["KeyPairId"] for one in self.ec2.describe_key_pairs(Filters=where)["KeyPairs"]]
        ids += [one["VolumeId"] for one in self.ec2.describe_volumes(Filters=where)["Volumes"]]
        found = self.ec2.describe_network_interfaces(Filters=where)["NetworkInterfaces"]
        ids += [one["NetworkInterfaceId"] for one in found]
        ids += [one["AllocationId"] for one in self.ec2.describe_addresses(Filters=where)["Addresses"]]
        groups = self.ec2.describe_placement_groups(Filters=where)["PlacementGroups"]
        return ids + [one["GroupId"] for one in groups]

    def changes(self) -> list[str]:
        """Return the calls of `down` that change something, repeated ones once."""
        made = [call for call in self.faults.calls if not call.startswith("Describe")]
        return [call for call, _ in itertools.groupby(made)]


def ids(found: tuple[Instance | Resource, ...]) -> list[str]:
    return [one.id for one in found]


def folder_of(account: Account, cluster_id: str = "", region: str = "us-east-1") -> ClusterFolder:
    """Write the keys and the record of a cluster that was created on this computer."""
    one = cluster_id or account.cluster_id
    folder = ClusterFolder(one)
    record = ClusterRecord(one, account.name, region, "", "2026-01-01T00:00:00Z")
    folder.create(record, private_key="private", host_public="ssh-ed25519 AAAA")
    return folder


def journal(folder: ClusterFolder) -> list[dict[str, Any]]:
    path = folder.path / "journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

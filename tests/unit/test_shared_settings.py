"""[[shared]]: its settings, what each node is asked for, and which file systems of AWS nodes reach."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import boto3
import pytest

from cloudddp.agent.protocol.start import SharedFolder
from cloudddp.aws import file_systems
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance
from cloudddp.config import settings
from cloudddp.config.settings import Layer
from cloudddp.config.spec import Config
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.job import project_files
from cloudddp.job.setup import shared_folders
from cloudddp.tags import Tags

ADDRESSES = {0: "10.0.0.4", 1: "10.0.0.5", 2: "10.0.0.6"}


def resolved(*shared: Any, **more: Any) -> Config:
    return settings.resolve([Layer("file", {"shared": list(shared), **more})])


def test_settings() -> None:
    config = resolved(
        {"path": "shared"}, {"path": "big/", "source": "fs-0123abcd"}, job={"outputs": ["shared"]}
    )
    assert [(one.place, one.source) for one in config.shared] == [("shared", "node0"), ("big", "fs-0123abcd")]
    assert config.links == ("shared", "big")


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        ({"source": "node0"}, "has no path"),
        ({"path": "../up"}, "shared.path"),
        ({"path": "results/x"}, "overlaps results"),
        ({"path": ".git"}, "overlaps .git"),
        ({"path": "s", "source": "node1"}, "shared.source"),
        ({"path": "s", "source": "fs-1; reboot"}, "shared.source"),
    ],
)
def test_bad_settings_are_refused(shared: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        resolved(shared, data=[{"source": "data"}])
    with pytest.raises(UsageError, match="overlaps the path s"):
        resolved({"path": "s"}, {"path": "s/t"})


def test_files_of_the_project_are_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/code.py").touch()
    with pytest.raises(UsageError, match=r"would be at shared, where the project has shared/code\.py"):
        project_files.of_config(tmp_path, resolved({"path": "shared"}))


def test_first_node_exports_and_the_others_mount() -> None:
    config = resolved({"path": "shared"}, {"path": "efs", "source": "fs-0123abcd"})
    found = shared_folders(config.shared, ADDRESSES, {"fs-0123abcd": "fs.aws@tcp:/abc"})
    own, fs = found[0]
    assert own == SharedFolder("shared", below="shared", clients=("10.0.0.5", "10.0.0.6"), owned=True)
    assert found[2][0] == SharedFolder("shared", "10.0.0.4:/", below="shared")
    assert fs == SharedFolder("efs", "fs.aws@tcp:/abc", owned=True)
    assert found[1][1] == replace(fs, owned=False)
    remaining = shared_folders(config.shared[:1], {1: "10.0.0.5", 2: "10.0.0.6"}, {})
    assert remaining[1][0].clients == ("10.0.0.6",), "node 0 is lost: the next one exports"


class Account:
    """A VPC with a node and its group, and another group for file systems."""

    def __init__(self) -> None:
        self.ec2 = boto3.client("ec2", "us-east-1")
        self.vpc = self.ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
        subnets = sorted(self.ec2.describe_subnets()["Subnets"], key=lambda one: one["AvailabilityZone"])
        self.subnets = [one["SubnetId"] for one in subnets]
        self.own, self.other = self.group("own"), self.group("other")
        interface = self.ec2.create_network_interface(SubnetId=self.subnets[0], Groups=[self.own])
        found = interface["NetworkInterface"]
        values = ("running", "", "", "g5.xlarge", found["AvailabilityZone"], False, found["PrivateIpAddress"])
        rest = ("", "r-1", 0, "", None, None, Tags(), found["NetworkInterfaceId"], (self.own,))
        self.node = Instance("i-1", *values, *rest)

    def group(self, name: str, vpc: str = "") -> str:
        created = self.ec2.create_security_group(GroupName=name, Description=name, VpcId=vpc or self.vpc)
        return str(created["GroupId"])

    def efs(self, subnet: str, group: str = "") -> str:
        client = boto3.client("efs", "us-east-1")
        name = str(client.create_file_system(CreationToken=subnet)["FileSystemId"])
        (found,) = self.ec2.describe_subnets(SubnetIds=[subnet])["Subnets"]
        address = str(ip_network(found["CidrBlock"])[200])
        groups = [group or self.other]
        client.create_mount_target(
            FileSystemId=name, SubnetId=subnet, IpAddress=address, SecurityGroups=groups
        )
        return name

    def find(self, name: str, *, warnings: Sequence[str] = ()) -> str:
        shown: list[str] = []
        found = file_systems.find(AWS(region="us-east-1"), name, self.node, shown.append)
        assert shown == list(warnings)
        return found


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    moto = pytest.importorskip("moto", reason="the extra `sim`")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with moto.mock_aws():
        yield Account()


def test_efs_is_mounted_by_the_address_in_the_nodes_zone(account: Account) -> None:
    """A mount target in another zone costs more."""
    name = account.efs(account.subnets[0])
    source = account.find(name)
    (target,) = boto3.client("efs", "us-east-1").describe_mount_targets(FileSystemId=name)["MountTargets"]
    assert source == f"{target['IpAddress']}:/"
    name, own = account.efs(account.subnets[1]), account.node.zone
    text = f"{name} has no mount target in zone {own}: nodes use that of us-east-1b, and AWS bills what "
    account.find(name, warnings=[f"{text}they read and write between zones"])


def test_efs_without_a_mount_target_and_in_another_vpc(account: Account) -> None:
    bare = boto3.client("efs", "us-east-1").create_file_system(CreationToken="bare")["FileSystemId"]
    with pytest.raises(CloudDDPError, match="no mount target that is available"):
        account.find(bare)
    vpc = account.ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet = account.ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.0.0/20")["Subnet"]["SubnetId"]
    with pytest.raises(CloudDDPError, match=f"is in {vpc}, and the cluster in {account.vpc}"):
        account.find(account.efs(subnet, account.group("there", vpc)))


def fsx(account: Account, kind: str, **more: Any) -> str:
    """Create a file system, of which AWS says more than moto; return its id."""
    from moto.fsx.models import fsx_backends

    created = boto3.client("fsx", "us-east-1").create_file_system(
        FileSystemType=kind, StorageCapacity=1200, SubnetIds=[account.subnets[0]]
    )
    name = str(created["FileSystem"]["FileSystemId"])
    model = fsx_backends["123456789012"]["us-east-1"].file_systems[name]
    answer = {**model.to_dict(), **more}
    model.to_dict = lambda: answer  # type: ignore[method-assign]
    return name


def test_fsx_for_lustre(account: Account) -> None:
    configuration = {"MountName": "abc"}
    with pytest.raises(CloudDDPError, match="has no network interface yet"):
        account.find(fsx(account, "LUSTRE", LustreConfiguration=configuration))
    created = account.ec2.create_network_interface(SubnetId=account.subnets[0], Groups=[account.other])
    interfaces = [created["NetworkInterface"]["NetworkInterfaceId"]]
    name = fsx(account, "LUSTRE", LustreConfiguration=configuration, NetworkInterfaceIds=interfaces)
    assert account.find(name) == f"{name}.fsx.us-east-1.amazonaws.com@tcp:/abc"


def test_unknown_file_systems_and_other_kinds_of_fsx_are_refused(account: Account) -> None:
    with pytest.raises(UsageError, match="is FSx for WINDOWS"):
        account.find(fsx(account, "WINDOWS"))
    with pytest.raises(UsageError, match="no file system fs-0123456789abcdef0 of EFS or FSx in us-east-1"):
        account.find("fs-0123456789abcdef0")

"""EFA devices that nodes show, and the Elastic IPs that instances with several interfaces need."""

from __future__ import annotations

from typing import Any

import pytest
from support.account import Account
from support.labnode import LabLaptop, attempt, shell
from support.simlab import Laptop, execute
from test_sim_interfaces import cards

QUERY = "fi_info -p efa -t FI_EP_RDM"


def domains(output: str) -> set[str]:
    return {line.split()[1] for line in output.splitlines() if line.strip().startswith("domain:")}


def launch(laptop: Laptop, nics: list[dict[str, Any]]) -> str:
    """Return the public address of a node with these interfaces: an Elastic IP if it has several."""
    (instance,) = laptop.launch(InstanceType="p4d.24xlarge", NetworkInterfaces=nics)
    if len(nics) == 1:
        return str(instance["PublicIpAddress"])
    address = laptop.ec2.allocate_address(Domain="vpc")
    laptop.ec2.associate_address(
        AllocationId=address["AllocationId"],
        NetworkInterfaceId=instance["NetworkInterfaces"][0]["NetworkInterfaceId"],
    )
    return str(address["PublicIp"])


def release(laptop: Laptop) -> None:
    for address in laptop.ec2.describe_addresses()["Addresses"]:
        if address.get("AssociationId"):
            laptop.ec2.disassociate_address(AssociationId=address["AssociationId"])
        laptop.ec2.release_address(AllocationId=address["AllocationId"])


def test_node_shows_an_efa_device_for_each_interface(lab_laptop: LabLaptop) -> None:
    """fi_info of libfabric: one endpoint of type FI_EP_RDM for each EFA device; status 61 (ENODATA) without
    any."""

    def grouped(nics: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**nic, "Groups": [lab_laptop.group]} for nic in nics]

    client = lab_laptop.connect(launch(lab_laptop, grouped(cards(4))))
    assert len(domains(shell(client, QUERY))) == 4
    assert len(domains(shell(client, "fi_info -p efa"))) == 8
    release(lab_laptop)
    without = launch(lab_laptop, grouped([{"DeviceIndex": 0, "AssociatePublicIpAddress": True}]))
    assert attempt(lab_laptop.connect(without), QUERY).status == 61


def test_process_node_answers_on_its_elastic_ip(laptop: Laptop) -> None:
    (instance,) = laptop.launch(InstanceType="p4d.24xlarge", NetworkInterfaces=cards(4))
    assert not instance.get("PublicIpAddress")
    before = execute(laptop.connect(instance["PrivateIpAddress"]), "pwd").out
    addresses = [laptop.ec2.allocate_address(Domain="vpc") for _ in range(2)]
    for address in addresses:
        laptop.ec2.associate_address(
            AllocationId=address["AllocationId"],
            NetworkInterfaceId=instance["NetworkInterfaces"][0]["NetworkInterfaceId"],
        )
        assert execute(laptop.connect(address["PublicIp"]), "pwd").out == before
    with pytest.raises(OSError):
        laptop.connect(addresses[0]["PublicIp"])
    release(laptop)
    with pytest.raises(OSError):
        laptop.connect(addresses[1]["PublicIp"])
    laptop.connect(instance["PrivateIpAddress"])


def test_process_node_shows_efa_devices_as_many_as_the_condition_allows(
    remote: Account, laptop: Laptop
) -> None:
    for allowed in (1, 0):
        client = laptop.connect(launch(laptop, [{"DeviceIndex": 0, "InterfaceType": "efa"}]))
        done = execute(client, QUERY)
        assert (done.status, len(domains(done.out.decode()))) == ((0, 1) if allowed else (61, 0))
        remote.conditions(efa_devices={"p4d.24xlarge": 0})

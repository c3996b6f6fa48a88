"""The network interfaces that an instance type gets, from EC2's own description of the type."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cloudddp.aws import instance_types
from cloudddp.aws.client import AWS
from cloudddp.cluster.requests import (
    ORDINARY,
    Interface,
    choose_interfaces,
    efa_devices,
    interface_parameters,
    needs_elastic_ip,
)
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.errors import UsageError
from cloudddp.simulator.aws import rehearse

P4D = (Interface(), Interface(0, 1, "efa-only"), *(Interface(card, 0, "efa-only") for card in (1, 2, 3)))


def chosen(instance_type: str, **settings: Any) -> tuple[Interface, ...]:
    spec = ClusterSpec(**{"instance_type": instance_type, "allow_cpu": True, **settings})
    with rehearse():
        return choose_interfaces(spec, instance_types.describe(AWS(region="us-east-1"), spec))


def test_several_cards_have_one_efa_only_interface_each() -> None:
    """EC2 User Guide, "Maximize network bandwidth on Amazon EC2 instances with multiple network cards": card
    0 device 0 interface, card 0 device 1 efa-only if the card supports EFA, every further card device 0
    efa-only."""
    assert chosen("p4d.24xlarge") == P4D


@pytest.mark.parametrize(
    ("instance_type", "total", "efa"),
    [("g6e.24xlarge", 3, 2), ("g6e.48xlarge", 5, 4)],  # others: test_golden_requests.py
)
def test_number_of_interfaces(instance_type: str, total: int, efa: int) -> None:
    found = chosen(instance_type)
    assert (len(found), efa_devices(found)) == (total, efa)
    assert found[0] == Interface(0, 0, "interface")
    assert len({(one.card, one.device) for one in found}) == total
    assert Counter(one.card for one in found)[0] == 2


def test_card_without_efa_has_the_primary_interface_only() -> None:
    """Card 0 of p6-b300 takes interfaces of type `interface` only (DescribeInstanceTypes, InterfaceTypes)."""
    found = chosen("p6-b300.48xlarge")
    assert [one.card for one in found] == list(range(17))
    assert efa_devices(found) == 16
    assert {one.device for one in found} == {0}


@pytest.mark.parametrize("instance_type", ["g5.12xlarge", "p5.4xlarge"])
def test_single_card_has_one_interface_of_type_efa(instance_type: str) -> None:
    assert chosen(instance_type) == (Interface(kind="efa"),)


@pytest.mark.parametrize(
    ("instance_type", "settings"),
    [("g5.xlarge", {}), ("p4d.24xlarge", {"efa": False}), ("p4d.24xlarge", {"nodes": 1}), ("m5.large", {})],
)
def test_without_efa_there_is_one_ordinary_interface(instance_type: str, settings: dict[str, Any]) -> None:
    assert chosen(instance_type, **settings) == ORDINARY


def test_required_efa_is_used_on_a_single_node() -> None:
    assert chosen("p4d.24xlarge", nodes=1, require_efa=True) == P4D


def test_required_efa_that_the_type_lacks() -> None:
    with pytest.raises(UsageError, match=r"g5\.xlarge has no EFA"):
        chosen("g5.xlarge", require_efa=True)


def test_without_interface_types_the_maximum_determines_the_efa_cards() -> None:
    """A botocore without InterfaceTypes: where there are fewer EFA interfaces than cards, the first ones take
    none."""
    cards = tuple(instance_types.NetworkCard(index, 2) for index in range(3))
    info = instance_types.TypeInfo(
        name="p9.large", architectures=(), vcpus=2, described_cards=cards, has_efa=True, efa_interfaces=2
    )
    assert ["efa" in card.kinds for card in info.network_cards] == [False, True, True]


@pytest.mark.parametrize("public", [True, False])
def test_public_address_is_requested_with_one_interface_only(public: bool) -> None:
    """API reference, AssociatePublicIpAddress: "You cannot specify more than one network interface in the
    request"."""
    (single,) = interface_parameters(ORDINARY, subnet_id="subnet-1", group="sg-1", public=public)
    assert single["AssociatePublicIpAddress"] is public
    assert "InterfaceType" not in single
    several = interface_parameters(P4D, subnet_id="subnet-1", group="sg-1", public=public)
    assert not any("AssociatePublicIpAddress" in one for one in several)
    assert {(one["SubnetId"], *one["Groups"], one["DeleteOnTermination"]) for one in several} == {
        ("subnet-1", "sg-1", True)
    }
    spec = ClusterSpec(connect="public" if public else "private")
    assert needs_elastic_ip(spec, P4D) is public
    assert not needs_elastic_ip(spec, ORDINARY)

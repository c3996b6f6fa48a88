"""VPC Block Public Access: the mode of the region and the exclusions, which moto lacks.

The lab's router follows them. Amazon VPC User Guide, "Block public access to VPCs and subnets":
block-bidirectional blocks all traffic of internet gateways, block-ingress all but that of NAT gateways. The
exclusion allow-bidirectional of a VPC or subnet allows everything; allow-egress allows connections from
inside, and "only applies when BPA is set to Bidirectional". Assumption: of a NAT gateway, its own subnet has
to be excluded, since its traffic passes the internet gateway from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cloudddp.simulator.ec2.patch import (
    add,
    backend_data,
    client_error,
    invalid_combination,
    invalid_value,
    result,
)

_MODES = ("off", "block-bidirectional", "block-ingress")
_EXCLUSION_MODES = ("allow-bidirectional", "allow-egress")


@dataclass
class _Setting:
    mode: str = "off"
    state: str = "default-state"
    updated: datetime | None = None


def install() -> None:
    """Add the actions to moto's EC2."""
    from moto.ec2.responses import EC2Response

    add(
        EC2Response,
        describe_vpc_block_public_access_options=_describe_options,
        modify_vpc_block_public_access_options=_modify_options,
        create_vpc_block_public_access_exclusion=_create_exclusion,
        describe_vpc_block_public_access_exclusions=_describe_exclusions,
        delete_vpc_block_public_access_exclusion=_delete_exclusion,
    )


def ways(backend: Any, subnet: Any) -> frozenset[str]:
    """Return what the internet gateway carries for a subnet: connections "in", "out", and those of its NAT
    gateways ("nat")."""
    mode, names = _setting(backend).mode, (subnet.id, subnet.vpc_id)
    excluded = {
        one["InternetGatewayExclusionMode"]
        for one in _exclusions(backend).values()
        if one["ResourceArn"].rpartition("/")[2] in names and one["State"] == "create-complete"
    }
    if mode == "off" or "allow-bidirectional" in excluded:
        return frozenset({"in", "out", "nat"})
    if mode == "block-ingress":
        return frozenset({"nat"})
    return frozenset({"out", "nat"} if "allow-egress" in excluded else ())


def _setting(backend: Any) -> _Setting:
    found: _Setting = backend_data(backend, "block_public_access", _Setting)
    return found


def _exclusions(backend: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = backend_data(backend, "block_public_access_exclusions", dict)
    return found


def _answer_options(backend: Any) -> Any:
    setting = _setting(backend)
    shown = {
        "AwsAccountId": backend.account_id,
        "AwsRegion": backend.region_name,
        "State": setting.state,
        "InternetGatewayBlockMode": setting.mode,
        "LastUpdateTimestamp": setting.updated,
        "ManagedBy": "account",
        "ExclusionsAllowed": "allowed",
    }
    return result(VpcBlockPublicAccessOptions=shown)


def _describe_options(response: Any) -> Any:
    response.error_on_dryrun()
    return _answer_options(response.ec2_backend)


def _modify_options(response: Any) -> Any:
    mode = _one_of(response, "InternetGatewayBlockMode", _MODES)
    response.error_on_dryrun()
    setting = _setting(response.ec2_backend)
    setting.mode, setting.state, setting.updated = mode, "update-complete", datetime.now(UTC)
    return _answer_options(response.ec2_backend)


def _one_of(response: Any, name: str, known: tuple[str, ...]) -> str:
    value = response._get_param(name)
    if value is None:
        client_error("MissingParameter", f"The request must contain the parameter {name}")
    if value not in known:
        invalid_value(f"Invalid value '{value}' for {name}.")
    return str(value)


def _create_exclusion(response: Any) -> Any:
    from moto.ec2.utils import random_id
    from moto.utilities.utils import get_partition

    backend = response.ec2_backend
    mode = _one_of(response, "InternetGatewayExclusionMode", _EXCLUSION_MODES)
    vpc, subnet = response._get_param("VpcId"), response._get_param("SubnetId")
    if (vpc is None) == (subnet is None):
        invalid_combination("The request must contain one of the parameters VpcId and SubnetId")
    resource = backend.get_vpc(vpc) if vpc else backend.get_subnet(subnet)
    if resource is None:
        client_error("InvalidVpcID.NotFound", f"The vpc ID '{vpc}' does not exist")
    response.error_on_dryrun()
    kind, name = ("vpc", vpc) if vpc else ("subnet", subnet)
    where = f"{get_partition(backend.region_name)}:ec2:{backend.region_name}:{backend.account_id}"
    made: dict[str, Any] = {
        "ExclusionId": random_id(prefix="vpcbpa-exclude"),
        "InternetGatewayExclusionMode": mode,
        "ResourceArn": f"arn:{where}:{kind}/{name}",
        "State": "create-complete",
        "CreationTimestamp": datetime.now(UTC),
    }
    _exclusions(backend)[made["ExclusionId"]] = made
    return result(VpcBlockPublicAccessExclusion=made)


def _describe_exclusions(response: Any) -> Any:
    response.error_on_dryrun()
    known = _exclusions(response.ec2_backend)
    names = response._get_param("ExclusionIds", [])
    found = [_exclusion(known, name) for name in names] if names else list(known.values())
    return result(VpcBlockPublicAccessExclusions=found)


def _delete_exclusion(response: Any) -> Any:
    response.error_on_dryrun()
    found = _exclusion(_exclusions(response.ec2_backend), response._get_param("ExclusionId"))
    found |= {"State": "delete-complete", "DeletionTimestamp": datetime.now(UTC)}
    return result(VpcBlockPublicAccessExclusion=found)


def _exclusion(known: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if name not in known:
        client_error(
            "InvalidVpcBlockPublicAccessExclusionId.NotFound", f"The exclusion ID '{name}' does not exist"
        )
    return known[name]

"""Idempotency of RunInstances: the same ClientToken gives the same reservation, in the same zone.

Zonal as on EC2: where a request names its zone or subnet, the token counts for that zone only, so that the same token
with another zone launches a second set of instances.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cloudddp.sim.ec2.patch import refuse, shelf

_NOT_COMPARED = ("ClientToken", "DryRun")
_LONGEST = 64


@dataclass(frozen=True, slots=True)
class _Made:
    digest: str
    reservation: Any


def once(backend: Any, asked: dict[str, Any], launch: Callable[[], Any]) -> tuple[Any, bool]:
    """The reservation of `asked`, made by `launch` or by an earlier request, and whether it is new.

    To be called under LOCK: a client that lost patience repeats a request that may still be at work.
    """
    token = asked.get("ClientToken")
    if not token:
        return launch(), True
    if len(token) > _LONGEST or not token.isascii():
        refuse(
            "InvalidParameterValue", f"Invalid client token '{token}': at most {_LONGEST} ASCII characters"
        )
    known: dict[tuple[str, str], _Made] = shelf(backend, "tokens", dict)
    key, digest = (token, _zone(backend, asked)), _digest(asked)
    if key not in known:
        known[key] = _Made(digest, launch())
        return known[key].reservation, True
    if known[key].digest != digest:
        refuse(
            "IdempotentParameterMismatch",
            "Arguments on this idempotent request are inconsistent with arguments used in previous request(s).",
        )
    if all(instance.state == "terminated" for instance in known[key].reservation.instances):
        refuse(
            "IdempotentInstanceTerminated",
            "The request to launch an instance uses the same client token as a previous request for which the "
            "instance has been terminated.",
        )
    return known[key].reservation, False


def _zone(backend: Any, asked: dict[str, Any]) -> str:
    """The zone that the request names, be it by a subnet; '' where it leaves the choice to EC2."""
    nics = asked.get("NetworkInterfaces") or []
    for subnet_id in (asked.get("SubnetId"), *(nic.get("SubnetId") for nic in nics)):
        if subnet_id:
            return str(backend.get_subnet(subnet_id).availability_zone)
    for nic in nics:
        if nic.get("NetworkInterfaceId"):
            return str(backend.get_network_interface(nic["NetworkInterfaceId"]).availability_zone)
    return str((asked.get("Placement") or {}).get("AvailabilityZone") or "")


def _digest(asked: dict[str, Any]) -> str:
    compared = {name: value for name, value in asked.items() if name not in _NOT_COMPARED}
    return hashlib.sha256(json.dumps(compared, sort_keys=True, default=str).encode()).hexdigest()

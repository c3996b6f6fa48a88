"""Idempotency of RunInstances: the same ClientToken returns the same reservation.

Tokens are zonal, as on EC2: if a request names a zone or subnet, the token is valid for that zone only, and
the same token with another zone launches a second set of instances.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cloudddp.sim.ec2.patch import backend_data, client_error, invalid_value

_NOT_COMPARED = ("ClientToken", "DryRun")
_MAX_LENGTH = 64


@dataclass(frozen=True, slots=True)
class _Launch:
    digest: str
    reservation: Any


def launch_once(backend: Any, request: dict[str, Any], launch: Callable[[], Any]) -> tuple[Any, bool]:
    """Return the reservation for a request, from `launch` or from an earlier request, and whether it is new.

    Call with LOCK held: a client that timed out repeats a request that may still be in progress.
    """
    token = request.get("ClientToken")
    if not token:
        return launch(), True
    if len(token) > _MAX_LENGTH or not token.isascii():
        invalid_value(f"Invalid client token '{token}': at most {_MAX_LENGTH} ASCII characters")
    known: dict[tuple[str, str], _Launch] = backend_data(backend, "tokens", dict)
    key, digest = (token, _zone(backend, request)), _digest(request)
    if key not in known:
        known[key] = _Launch(digest, launch())
        return known[key].reservation, True
    if known[key].digest != digest:
        client_error(
            "IdempotentParameterMismatch",
            "Arguments on this idempotent request are inconsistent with arguments used in previous "
            "request(s).",
        )
    if all(instance.state == "terminated" for instance in known[key].reservation.instances):
        client_error(
            "IdempotentInstanceTerminated",
            "The request to launch an instance uses the same client token as a previous request for which "
            "the instance has been terminated.",
        )
    return known[key].reservation, False


def _zone(backend: Any, request: dict[str, Any]) -> str:
    """Return the zone that the request names, also through a subnet; '' if EC2 is to choose."""
    nics = request.get("NetworkInterfaces") or []
    for subnet_id in (request.get("SubnetId"), *(nic.get("SubnetId") for nic in nics)):
        if subnet_id:
            return str(backend.get_subnet(subnet_id).availability_zone)
    for nic in nics:
        if nic.get("NetworkInterfaceId"):
            return str(backend.get_network_interface(nic["NetworkInterfaceId"]).availability_zone)
    return str((request.get("Placement") or {}).get("AvailabilityZone") or "")


def _digest(request: dict[str, Any]) -> str:
    compared = {name: value for name, value in request.items() if name not in _NOT_COMPARED}
    return hashlib.sha256(json.dumps(compared, sort_keys=True, default=str).encode()).hexdigest()

"""RunInstances: checks a request before anything is created, and calls the other modules in EC2's order.

A launch is all or nothing up to MinCount, and leaves nothing behind when it fails. The same ClientToken
returns the same reservation. Tokens are zonal, as on EC2: if a request names a zone or subnet, the token is
valid for that zone only, and the same token with another zone launches a second set of instances.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cloudddp.simulator.ec2 import (
    capacity,
    catalog,
    interfaces,
    placement,
    reservations,
    security_groups,
    spot,
    volumes,
)
from cloudddp.simulator.ec2.patch import (
    backend_data,
    client_error,
    invalid_value,
    override,
    parameters,
    serving,
)

_USER_DATA_LIMIT = 16384  # bytes, before base64
_NOT_COMPARED = ("ClientToken", "DryRun")
_MAX_TOKEN = 64  # characters


def install() -> None:
    """Patch moto's RunInstances: its handling of requests, and its creation of instances."""
    from moto.ec2.models import EC2Backend
    from moto.ec2.responses.instances import InstanceResponse

    override(InstanceResponse, "run_instances", _respond)
    override(InstanceResponse, "describe_instance_credit_specifications", _credits)
    override(EC2Backend, "run_instances", _launch)


def _respond(original: Callable[..., Any], self: Any) -> Any:
    from moto.core.responses import ActionResult

    request = _plain(self.params)
    _check_counts(request)
    _check_user_data(request.get("UserData"))
    _check_profile(self, request.get("IamInstanceProfile") or {})
    if request.get("DryRun"):
        return original(self)
    reservation, new = _launch_once(self.ec2_backend, request, lambda: _create(self, request, original))
    if not new:
        _show_current_states(self)
    return ActionResult(reservation)


@dataclass(frozen=True, slots=True)
class _Launched:
    digest: str
    reservation: Any


def _launch_once(backend: Any, request: dict[str, Any], launch: Callable[[], Any]) -> tuple[Any, bool]:
    """Return the reservation for a request, from `launch` or from an earlier request, and whether it is
    new."""
    token = request.get("ClientToken")
    if not token:
        return launch(), True
    if len(token) > _MAX_TOKEN or not token.isascii():
        invalid_value(f"Invalid client token '{token}': at most {_MAX_TOKEN} ASCII characters")
    known: dict[tuple[str, str], _Launched] = backend_data(backend, "tokens", dict)
    key, digest = (token, _token_zone(backend, request)), _digest(request)
    if key not in known:
        known[key] = _Launched(digest, launch())
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


def _token_zone(backend: Any, request: dict[str, Any]) -> str:
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


def _plain(value: Any) -> Any:
    """Return moto's parsed parameters in plain containers, with the names of the API."""
    if hasattr(value, "original_dict"):
        value = value.original_dict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _create(response: Any, request: dict[str, Any], original: Callable[..., Any]) -> Any:
    with serving(request):
        reservation = original(response).result
    profile = request.get("IamInstanceProfile") or {}
    # moto associates it with the first one only.
    for instance in reservation.instances[1:] if profile else ():
        response.ec2_backend.associate_iam_instance_profile(
            instance_id=instance.id,
            iam_instance_profile_name=profile.get("Name"),
            iam_instance_profile_arn=profile.get("Arn"),
        )
    return reservation


def _show_current_states(response: Any) -> None:
    """Undo moto's transformation that shows every instance of a RunInstances response as pending."""
    path = "RunInstances.Reservation.Instances.Instance.State"
    others = {key: value for key, value in response.RESPONSE_KEY_PATH_TO_TRANSFORMER.items() if key != path}
    response.RESPONSE_KEY_PATH_TO_TRANSFORMER = others


def _check_counts(request: dict[str, Any]) -> None:
    minimum, maximum = int(request.get("MinCount", 1)), int(request.get("MaxCount", 1))
    if minimum < 1:
        invalid_value(f"Value ({minimum}) for parameter minCount is invalid. Minimum is 1.")
    if minimum > maximum:
        invalid_value(f"minCount ({minimum}) must not be more than maxCount ({maximum})")


def _check_user_data(encoded: Any) -> None:
    try:
        size = len(b64decode(encoded or ""))
    except ValueError:
        return  # moto rejects it
    if size > _USER_DATA_LIMIT:
        invalid_value(f"User data is limited to {_USER_DATA_LIMIT} bytes")


def _check_profile(response: Any, profile: dict[str, Any]) -> None:
    from moto.core.exceptions import ServiceException
    from moto.ec2.utils import filter_iam_instance_profiles

    if not profile:
        return
    try:
        filter_iam_instance_profiles(
            response.current_account,
            partition=response.partition,
            iam_instance_profile_arn=profile.get("Arn"),
            iam_instance_profile_name=profile.get("Name"),
        )
    except ServiceException:
        by = "arn" if profile.get("Arn") else "name"
        value = profile.get("Arn") or profile.get("Name")
        invalid_value(
            f"Value ({value}) for parameter iamInstanceProfile.{by} is invalid. "
            f"Invalid IAM Instance Profile {by if by == 'name' else 'ARN'}"
        )


def _launch(
    original: Callable[..., Any], self: Any, image_id: str, count: int, *args: Any, **kwargs: Any
) -> Any:
    launch, group, reserved = _check(self, image_id, count, kwargs)
    granted = capacity.grant(self, launch)
    kwargs["disable_api_termination"] = bool(parameters().get("DisableApiTermination"))
    reservation = _all_or_none(self, lambda: original(self, image_id, granted, *args, **kwargs))
    for instance in reservation.instances:
        if reserved is None:
            capacity.allocate(instance)
        else:
            reservations.join(instance, reserved)
        instance.reservation_id = reservation.id
        _complete(instance, group, kwargs)
    return reservation


def _check(
    backend: Any, image_id: str, min_count: int, kwargs: dict[str, Any]
) -> tuple[capacity.Launch, Any, Any]:
    """Check all but capacity, in EC2's order. Return what the launch needs, its placement group or None, and
    the capacity reservation that it uses or None."""
    max_count = int(parameters().get("MaxCount", min_count))
    nics, instance_type = kwargs.get("nics") or [], str(kwargs.get("instance_type"))
    security_groups.check_interfaces(backend, nics)
    volumes.check(backend, image_id, kwargs.get("block_device_mappings") or [])
    interfaces.check(instance_type, nics, count=max_count, groups=_names_groups())
    names_zone = _choose_subnet(backend, kwargs, instance_type, min_count)
    zone = _zone(backend, kwargs)
    group = placement.check(
        backend,
        parameters().get("Placement") or {},
        instance_type=instance_type,
        zone=zone,
        spot=_spot_options(),
    )
    _check_exists(backend, image_id, kwargs, instance_type)
    market = str((parameters().get("InstanceMarketOptions") or {}).get("MarketType") or "")
    needed = reservations.request_of(market, instance_type, zone, min_count, group)
    reserved = reservations.check(backend, needed)
    if reserved is None:
        reserved = reservations.open_for(backend, needed)
    launch = capacity.Launch(
        instance_type=instance_type,
        zone=zone,
        names_zone=names_zone,
        spot="spot" in (kwargs.get("lifecycle"), kwargs.get("instance_market_options")),
        min_count=min_count,
        max_count=max_count,
        addresses=capacity.addresses_of(nics, kwargs.get("subnet_id")),
        reserved=reserved is not None,
        block=market == "capacity-block",
    )
    return launch, group, reserved


def _names_groups() -> bool:
    return bool(parameters().get("SecurityGroupIds") or parameters().get("SecurityGroups"))


def _spot_options() -> dict[str, Any]:
    return dict((parameters().get("InstanceMarketOptions") or {}).get("SpotOptions") or {})


def _choose_subnet(backend: Any, kwargs: dict[str, Any], instance_type: str, min_count: int) -> bool:
    """Choose a default subnet if the request names none. Return whether the request names a zone or
    subnet."""
    nics = kwargs.get("nics") or []
    if kwargs.get("subnet_id") or any(nic.get("SubnetId") or nic.get("NetworkInterfaceId") for nic in nics):
        return True
    defaults = backend.get_default_subnets()
    zone = kwargs.get("placement")
    if defaults:
        # Without a subnet, moto assigns a random address, and AWS uses the zone's default subnet.
        chosen = zone or capacity.choose_zone(backend, instance_type, min_count, sorted(defaults))
        kwargs["subnet_id"] = (defaults.get(chosen) or defaults[min(defaults)]).id
    return bool(zone)


def _zone(backend: Any, kwargs: dict[str, Any]) -> str:
    nics = sorted(kwargs.get("nics") or [], key=interfaces.position)
    if nics and nics[0].get("NetworkInterfaceId"):
        return str(backend.get_network_interface(nics[0]["NetworkInterfaceId"]).availability_zone)
    subnet_id = (nics[0].get("SubnetId") if nics else None) or kwargs.get("subnet_id")
    if subnet_id:
        return str(backend.get_subnet(subnet_id).availability_zone)
    return str(kwargs.get("placement") or f"{backend.region_name}a")


def _check_exists(backend: Any, image_id: str, kwargs: dict[str, Any], instance_type: str) -> None:
    """Run moto's own checks before capacity is checked: EC2 reports a wrong id first."""
    if image_id:
        backend.describe_images(ami_ids=[image_id])
    if kwargs.get("key_name"):
        backend.describe_key_pairs(key_names=[kwargs["key_name"]])
    if instance_type not in catalog.types():
        invalid_value(f"Invalid value '{instance_type}' for InstanceType.")


def _all_or_none(backend: Any, launch: Callable[[], Any]) -> Any:
    """Undo a launch that fails after some instances were created: on AWS, it leaves nothing."""
    known = set(backend.reservations)
    try:
        return launch()
    except BaseException:
        for name in [name for name in backend.reservations if name not in known]:
            for instance in backend.reservations[name].instances:
                instance.terminate()
            del backend.reservations[name]
        raise


def _credits(original: Callable[..., Any], self: Any) -> Any:
    """Show how CPU beyond the baseline is paid for, which moto says is `standard`: without a setting it is
    `unlimited`, billed by the hour, but for T2 (EC2 User Guide, "Burstable performance instances")."""
    answer = original(self)
    for one in answer.result["InstanceCreditSpecifications"]:
        one["CpuCredits"] = self.ec2_backend.get_instance(one["InstanceId"])._credits
    return answer


def _complete(instance: Any, group: Any, kwargs: dict[str, Any]) -> None:
    credit = (parameters().get("CreditSpecification") or {}).get("CpuCredits")
    instance._credits = credit or ("standard" if instance.instance_type.startswith("t2.") else "unlimited")
    tags = kwargs.get("tags") or {}
    market = kwargs.get("instance_market_options")
    for interface in instance.nics.values():
        interface.add_tags(tags.get("network-interface", {}))
    if group is not None:
        placement.join(instance, group)
    if market == "spot":
        spot.request(instance, _spot_options(), tags)
    elif market:  # moto takes every market for spot
        instance.lifecycle = market if market == "capacity-block" else None

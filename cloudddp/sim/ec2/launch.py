"""RunInstances: what a request is checked for before anything is made, and in which order the other rooms act.

A launch is all or nothing up to MinCount, and leaves nothing behind when it fails.
"""

from __future__ import annotations

import functools
from base64 import b64decode
from collections.abc import Callable
from typing import Any

from cloudddp.sim.ec2 import capacity, disks, groups, interfaces, placement, spot, tokens
from cloudddp.sim.ec2.patch import LOCK, refuse, wrap
from cloudddp.sim.ec2.request import answering, asked, is_spot

_USER_DATA_LIMIT = 16384  # bytes, before base64


def install() -> None:
    """Put the checks around moto's RunInstances: its answer to requests, and its making of instances."""
    from moto.ec2.models import EC2Backend
    from moto.ec2.responses.instances import InstanceResponse

    wrap(InstanceResponse, "run_instances", _answer)
    wrap(EC2Backend, "run_instances", _launch)


def _answer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_instances(self: Any) -> Any:
        from moto.core.responses import ActionResult

        parameters = _plain(self.params)
        _check_counts(parameters)
        _check_user_data(parameters.get("UserData"))
        _check_profile(self, parameters.get("IamInstanceProfile") or {})
        if parameters.get("DryRun"):
            return original(self)
        with LOCK:
            reservation, new = tokens.once(
                self.ec2_backend, parameters, lambda: _made(self, parameters, original)
            )
            if not new:
                _show_states(self)
            return ActionResult(reservation)

    return run_instances


def _plain(value: Any) -> Any:
    """Parameters as moto has parsed them, with the API's names, in plain containers."""
    if hasattr(value, "original_dict"):
        value = value.original_dict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _made(response: Any, parameters: dict[str, Any], original: Callable[..., Any]) -> Any:
    with answering(parameters):
        reservation = original(response).result
    profile = parameters.get("IamInstanceProfile") or {}
    for instance in reservation.instances[1:] if profile else ():  # moto gives it to the first only
        response.ec2_backend.associate_iam_instance_profile(
            instance_id=instance.id,
            iam_instance_profile_name=profile.get("Name"),
            iam_instance_profile_arn=profile.get("Arn"),
        )
    return reservation


def _show_states(response: Any) -> None:
    """moto calls every instance of a RunInstances answer pending, which is true of new ones only."""
    path = "RunInstances.Reservation.Instances.Instance.State"
    kept = {key: value for key, value in response.RESPONSE_KEY_PATH_TO_TRANSFORMER.items() if key != path}
    response.RESPONSE_KEY_PATH_TO_TRANSFORMER = kept


def _check_counts(parameters: dict[str, Any]) -> None:
    least, most = int(parameters.get("MinCount", 1)), int(parameters.get("MaxCount", 1))
    if least < 1:
        refuse("InvalidParameterValue", f"Value ({least}) for parameter minCount is invalid. Minimum is 1.")
    if least > most:
        refuse("InvalidParameterValue", f"minCount ({least}) must not be more than maxCount ({most})")


def _check_user_data(encoded: Any) -> None:
    try:
        size = len(b64decode(encoded or ""))
    except ValueError:
        return  # moto's own check answers
    if size > _USER_DATA_LIMIT:
        refuse("InvalidParameterValue", f"User data is limited to {_USER_DATA_LIMIT} bytes")


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
        refuse(
            "InvalidParameterValue",
            f"Value ({value}) for parameter iamInstanceProfile.{by} is invalid. "
            f"Invalid IAM Instance Profile {by if by == 'name' else 'ARN'}",
        )


def _launch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, image_id: str, count: int, *args: Any, **kwargs: Any) -> Any:
        with LOCK:
            most = int(asked().get("MaxCount", count))
            nics, instance_type = kwargs.get("nics") or [], _type(self, kwargs)
            groups.check(self, nics)
            disks.check(self, image_id, kwargs.get("block_device_mappings") or [])
            interfaces.check(instance_type, nics, count=most, groups=_names_groups())
            chosen = _place(self, kwargs, instance_type, count)
            zone = _zone(self, kwargs)
            group = placement.check(
                self,
                asked().get("Placement") or {},
                instance_type=instance_type,
                zone=zone,
                spot=_spot_options(),
            )
            _check_known(self, image_id, kwargs, instance_type)
            granted = capacity.grant(
                self,
                capacity.Wish(
                    instance_type=instance_type,
                    zone=zone,
                    chosen=chosen,
                    spot=is_spot(kwargs),
                    least=count,
                    most=most,
                    addresses=capacity.addresses_of(nics, kwargs.get("subnet_id")),
                ),
            )
            kwargs["disable_api_termination"] = bool(asked().get("DisableApiTermination"))
            reservation = _all_or_none(self, lambda: original(self, image_id, granted, *args, **kwargs))
            for instance in reservation.instances:
                capacity.take(instance)
                instance.reservation_id = reservation.id
                _finish(instance, group, kwargs)
            return reservation

    return run


def _names_groups() -> bool:
    return bool(asked().get("SecurityGroupIds") or asked().get("SecurityGroups"))


def _spot_options() -> dict[str, Any]:
    return dict((asked().get("InstanceMarketOptions") or {}).get("SpotOptions") or {})


def _type(backend: Any, kwargs: dict[str, Any]) -> str:
    """The instance type, which may come from a launch template."""
    if kwargs.get("launch_template") and kwargs.get("is_instance_type_default"):
        template = backend._get_template_from_args(kwargs["launch_template"]).data
        return str(template.get("InstanceType") or kwargs["instance_type"])
    return str(kwargs.get("instance_type"))


def _place(backend: Any, kwargs: dict[str, Any], instance_type: str, least: int) -> bool:
    """Choose a default subnet for a request that names none. Return whether the request names a zone itself."""
    nics = kwargs.get("nics") or []
    if kwargs.get("subnet_id") or any(nic.get("SubnetId") or nic.get("NetworkInterfaceId") for nic in nics):
        return True
    defaults = backend.get_default_subnets()
    zone = kwargs.get("placement")
    if defaults:
        # Without a subnet, moto takes an address out of the air, and AWS the zone's default subnet.
        picked = zone or capacity.zone_with_room(backend, instance_type, least, sorted(defaults))
        kwargs["subnet_id"] = (defaults.get(picked) or defaults[min(defaults)]).id
    return bool(zone)


def _zone(backend: Any, kwargs: dict[str, Any]) -> str:
    nics = sorted(kwargs.get("nics") or [], key=interfaces.place)
    if nics and nics[0].get("NetworkInterfaceId"):
        return str(backend.get_network_interface(nics[0]["NetworkInterfaceId"]).availability_zone)
    subnet_id = (nics[0].get("SubnetId") if nics else None) or kwargs.get("subnet_id")
    if subnet_id:
        return str(backend.get_subnet(subnet_id).availability_zone)
    return str(kwargs.get("placement") or f"{backend.region_name}a")


def _check_known(backend: Any, image_id: str, kwargs: dict[str, Any], instance_type: str) -> None:
    """What moto checks itself, before capacity is asked about: EC2 names a wrong id first."""
    from cloudddp.sim.ec2 import catalog

    if image_id:
        backend.describe_images(ami_ids=[image_id])
    if kwargs.get("key_name"):
        backend.describe_key_pairs(key_names=[kwargs["key_name"]])
    if instance_type not in catalog.types():
        refuse("InvalidParameterValue", f"Invalid value '{instance_type}' for InstanceType.")


def _all_or_none(backend: Any, launch: Callable[[], Any]) -> Any:
    """A launch that fails half way must not leave the half: on AWS it leaves nothing."""
    known = set(backend.reservations)
    try:
        return launch()
    except BaseException:
        for name in [name for name in backend.reservations if name not in known]:
            for instance in backend.reservations[name].instances:
                instance.terminate()
            del backend.reservations[name]
        raise


def _finish(instance: Any, group: Any, kwargs: dict[str, Any]) -> None:
    tags = kwargs.get("tags") or {}
    market = kwargs.get("instance_market_options")
    for interface in instance.nics.values():
        interface.add_tags(tags.get("network-interface", {}))
    if group is not None:
        placement.join(instance, group)
    if market == "spot":
        spot.request(instance, _spot_options(), tags)
    elif market:  # moto calls every market spot
        instance.lifecycle = market if market == "capacity-block" else None

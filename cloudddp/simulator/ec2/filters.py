"""Filters of DescribeInstances that moto lacks, and wildcards in their values.

An unknown filter is answered with EC2's error.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from cloudddp.simulator.ec2.patch import invalid_value, override, wrap

# filter -> attribute path of moto's Instance
_ATTRIBUTES = {
    "client-token": "client_token",
    "reservation-id": "reservation_id",
    "placement-group-name": "placement.group_name",
    "instance-lifecycle": "lifecycle",
    "capacity-reservation-id": "capacity_reservation_id",
    "spot-instance-request-id": "spot_instance_request_id",
    "instance-state-code": "state_code",
    "iam-instance-profile.arn": "iam_instance_profile.Arn",
    "tenancy": "placement.tenancy",
    "root-device-name": "root_device_name",
    "network-interface.network-interface-id": "network_interfaces.id",
    "network-interface.subnet-id": "network_interfaces.subnet_id",
    "network-interface.vpc-id": "network_interfaces.vpc_id",
    "network-interface.availability-zone": "network_interfaces.availability_zone",
    "network-interface.description": "network_interfaces.description",
    "network-interface.mac-address": "network_interfaces.mac_address",
    "network-interface.owner-id": "network_interfaces.owner_id",
    "network-interface.status": "network_interfaces.status",
    "network-interface.addresses.private-ip-address": "network_interfaces.private_ip_address",
    "network-interface.addresses.association.public-ip": "network_interfaces.public_ip",
    "network-interface.association.public-ip": "network_interfaces.public_ip",
    "network-interface.attachment.attachment-id": "network_interfaces.attachment_id",
    "network-interface.attachment.device-index": "network_interfaces.device_index",
    "network-interface.network-card-index": "network_interfaces.network_card_index",
    "network-interface.attachment.network-card-index": "network_interfaces.network_card_index",
}


def install() -> None:
    """Extend moto's table of instance filters."""
    from moto.ec2 import utils

    def extend(original: dict[str, str]) -> dict[str, str]:
        return {**original, **_ATTRIBUTES}

    wrap(utils, "filter_dict_attribute_mapping", extend)
    override(utils, "passes_filter_dict", _passes)
    wrap(utils, "instance_value_in_filter_values", lambda _original: _matches)


def _passes(original: Callable[..., bool], instance: Any, filter_dict: dict[str, Any]) -> bool:
    for name, values in filter_dict.items():
        if name in _SPECIAL:
            passes = _matches(_SPECIAL[name](instance), values)
        else:
            passes = _moto_passes(original, instance, name, values)
        if not passes:
            return False
    return True


def _moto_passes(original: Callable[..., bool], instance: Any, name: str, values: Any) -> bool:
    try:
        return original(instance, {name: values})
    except NotImplementedError:  # moto has no such filter
        invalid_value(f"The filter '{name}' is invalid (or unknown to the simulator)")


def _groups(attribute: str) -> Callable[[Any], list[str]]:
    return lambda instance: [
        getattr(group, attribute) for nic in instance.network_interfaces for group in nic._group_set
    ]


_SPECIAL: dict[str, Callable[[Any], Any]] = {
    "network-interface.group-id": _groups("id"),
    "network-interface.group-name": _groups("name"),
    "launch-time": lambda instance: instance.launch_time.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
}


def _matches(value: Any, patterns: Any) -> bool:
    """Return whether a value, or any value of a list, matches one of the patterns (`*` and `?`)."""
    values = value if isinstance(value, list) else [value]
    texts = [str(one).lower() if isinstance(one, bool) else str(one) for one in values if one is not None]
    return any(fnmatchcase(text, str(pattern)) for text in texts for pattern in patterns)

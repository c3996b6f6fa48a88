"""Spot requests of instances that RunInstances launched on the spot market: described and closed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from cloudddp.simulator.ec2.patch import override, wrap

BY_USER = "instance-terminated-by-user"
NO_CAPACITY = "instance-terminated-no-capacity"

_MESSAGES = {
    "fulfilled": "Your Spot request is fulfilled.",
    BY_USER: "Spot Instance terminated due to user-initiated termination.",
    NO_CAPACITY: "Your Spot Instance was terminated because there is no Spot capacity available.",
}


def install() -> None:
    """Patch moto's spot requests, which have no state of their own."""
    from moto.ec2.models.spot_requests import SpotInstanceRequest

    override(SpotInstanceRequest, "__init__", _create)
    wrap(SpotInstanceRequest, "status", lambda _original: property(_status))
    wrap(SpotInstanceRequest, "create_time", lambda _original: property(lambda self: self._created))


def request(instance: Any, options: dict[str, Any], tags: dict[str, dict[str, str]]) -> None:
    """Create the request that a launched instance fulfils. `options`: the SpotOptions of RunInstances."""
    from moto.ec2.models.spot_requests import SpotInstanceRequest
    from moto.ec2.utils import random_spot_request_id

    class Fulfilled(SpotInstanceRequest):
        """moto's request, for an existing instance."""

        def launch_instance(self) -> Any:
            return instance

    fulfilled = Fulfilled(
        instance.ec2_backend,
        spot_request_id=random_spot_request_id(),
        price=str(options.get("MaxPrice") or ""),
        image_id=instance.image_id,
        spot_instance_type=options.get("SpotInstanceType") or "one-time",
        valid_from=None,
        valid_until=options.get("ValidUntil"),
        launch_group=None,
        availability_zone_group=None,
        key_name=instance.key_name,
        security_groups=[group.id for group in instance.security_groups],
        user_data=None,
        instance_type=instance.instance_type,
        placement=instance.placement.zone,
        kernel_id=None,
        ramdisk_id=None,
        monitoring_enabled=instance.monitored,
        subnet_id=instance.subnet_id,
        tags=tags,
        spot_fleet_id=None,
        instance_interruption_behaviour=options.get("InstanceInterruptionBehavior"),
    )
    instance.ec2_backend.spot_instance_requests[fulfilled.id] = fulfilled


def is_one_time(instance: Any) -> bool:
    """Return whether this is a spot instance that EC2 terminates but does not stop."""
    if instance.lifecycle != "spot":
        return False
    requests = instance.ec2_backend.spot_instance_requests
    own = requests.get(getattr(instance, "spot_instance_request_id", None))
    return own is None or own.type != "persistent"


def close(instance: Any, code: str = BY_USER) -> None:
    """Close the instance's open request, if it has one, with this status code."""
    for one in list(instance.ec2_backend.spot_instance_requests.values()):
        if one.instance is instance and one.state in ("active", "open"):
            _set_state(one, "closed", code)


def _set_state(spot_request: Any, state: str, code: str) -> None:
    spot_request.state, spot_request._status_code = state, code
    spot_request.status_message = _MESSAGES[code]
    spot_request._updated = datetime.now(UTC)


def _create(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    self._created = self._updated = datetime.now(UTC)
    original(self, *args, **kwargs)
    _set_state(self, "active", "fulfilled")
    self.instance.spot_instance_request_id = self.id


def _status(spot_request: Any) -> dict[str, Any]:
    return {
        "Code": spot_request._status_code,
        "Message": spot_request.status_message,
        "UpdateTime": spot_request._updated,
    }

"""Spot requests of instances that RunInstances launched on the spot market: described, cancelled, closed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from cloudddp.simulator.ec2.patch import client_error, override, wrap

BY_USER = "instance-terminated-by-user"
NO_CAPACITY = "instance-terminated-no-capacity"

_MESSAGES = {
    "fulfilled": "Your Spot request is fulfilled.",
    "request-canceled-and-instance-running": "Your Spot request is canceled, but your instance is still "
    "running.",
    BY_USER: "Spot Instance terminated due to user-initiated termination.",
    NO_CAPACITY: "Your Spot Instance was terminated because there is no Spot capacity available.",
}


def install() -> None:
    """Patch moto's spot requests, which have no state of their own."""
    from moto.ec2.models import EC2Backend
    from moto.ec2.models.spot_requests import SpotInstanceRequest

    override(SpotInstanceRequest, "__init__", _create)
    wrap(SpotInstanceRequest, "status", lambda _original: property(_status))
    wrap(SpotInstanceRequest, "create_time", lambda _original: property(lambda self: self._created))
    override(SpotInstanceRequest, "get_filter_value", _filter_value)
    override(EC2Backend, "describe_spot_instance_requests", _describe)
    wrap(EC2Backend, "cancel_spot_instance_requests", lambda _original: _cancel)


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


def _filter_value(
    original: Callable[..., Any], self: Any, filter_name: str, method_name: str | None = None
) -> Any:
    values = {
        "instance-id": self.instance.id,
        "status-code": self._status_code,
        "launch.instance-type": self.instance.instance_type,
        "launched-availability-zone": self.instance.placement.zone,
    }
    return values[filter_name] if filter_name in values else original(self, filter_name, method_name)


def _describe(
    original: Callable[..., Any], self: Any, filters: Any = None, spot_instance_ids: list[str] | None = None
) -> Any:
    _check_exist(self, spot_instance_ids or [])
    return original(self, filters=filters, spot_instance_ids=spot_instance_ids)


def _cancel(backend: Any, request_ids: list[str]) -> list[Any]:
    """Cancel requests and keep them: moto deletes them, EC2 shows them for hours and leaves the instance
    running."""
    _check_exist(backend, request_ids)
    cancelled = [backend.spot_instance_requests[one] for one in request_ids]
    for one in cancelled:
        if one.state in ("active", "open"):
            _set_state(one, "cancelled", "request-canceled-and-instance-running")
    return cancelled


def _check_exist(backend: Any, request_ids: list[str]) -> None:
    unknown = [one for one in request_ids if one not in backend.spot_instance_requests]
    if unknown:
        client_error(
            "InvalidSpotInstanceRequestID.NotFound",
            f"The spot instance request ID '{unknown[0]}' does not exist",
        )

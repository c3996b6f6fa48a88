"""StopInstances, StartInstances and what may be changed in between: what EC2 refuses, all of a request or none.

A stopped instance gives its place in the zone up, and has to find one again to be started, as a launch has. What stops
and starts behind an instance, and how long it takes, is not known here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from cloudddp.sim.ec2 import capacity, catalog, spot
from cloudddp.sim.ec2.patch import LOCK, refuse, wrap


def install() -> None:
    """Put the checks around moto's stopping, starting and changing of instances."""
    from moto.ec2.models import EC2Backend
    from moto.ec2.models.instances import Instance
    from moto.ec2.responses.instances import InstanceResponse

    wrap(Instance, "stop", _stopped)
    wrap(EC2Backend, "stop_instances", _stop)
    wrap(EC2Backend, "start_instances", _start)
    wrap(EC2Backend, "modify_instance_attribute", _change)
    wrap(InstanceResponse, "_attribute_value_handler", _change_by_name)


def _stopped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def stop(self: Any) -> Any:
        with LOCK:
            capacity.leave(self)
            return original(self)

    return stop


def _stop(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def stop(self: Any, instance_ids: list[str]) -> Any:
        with LOCK:
            instances = self.get_multi_instances_by_id(list(dict.fromkeys(instance_ids)))
            _check_states(instances, ("pending", "running", "stopping", "stopped"), "stopped")
            for instance in instances:
                if spot.is_one_time(instance):
                    refuse(
                        "UnsupportedOperation",
                        f"You can't stop the Spot Instance '{instance.id}' because it is associated with a one-time "
                        "Spot Instance request. You can only stop Spot Instances associated with persistent Spot "
                        "Instance requests.",
                    )
            return original(self, instance_ids)

    return stop


def _start(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start(self: Any, instance_ids: list[str]) -> Any:
        with LOCK:
            instances = self.get_multi_instances_by_id(list(dict.fromkeys(instance_ids)))
            _check_states(instances, ("pending", "running", "stopped"), "started")
            _take_places(self, [instance for instance in instances if instance.state == "stopped"])
            return original(self, instance_ids)

    return start


def _take_places(backend: Any, instances: Iterable[Any]) -> None:
    taken = []
    try:
        for instance in instances:
            wish = capacity.Wish(
                instance_type=instance.instance_type,
                zone=capacity.zone_of(instance),
                chosen=True,
                spot=instance.lifecycle == "spot",
                least=1,
                most=1,
                addresses={},  # which it has kept
            )
            capacity.grant(backend, wish)
            capacity.take(instance)
            taken.append(instance)
    except Exception:
        for instance in taken:
            capacity.leave(instance)
        raise


def _check_states(instances: Iterable[Any], allowed: tuple[str, ...], what: str) -> None:
    for instance in instances:
        if instance.state not in allowed:
            refuse(
                "IncorrectInstanceState",
                f"The instance '{instance.id}' is not in a state from which it can be {what}.",
            )


def _change(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def modify(self: Any, instance_id: str, key: str, value: Any) -> Any:
        with LOCK:
            if key == "instance_type":
                _check_type(self.get_instance(instance_id), value)
            return original(self, instance_id, key, value)

    return modify


def _change_by_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """moto would set whatever its own object has."""
    from moto.ec2.models.instances import Instance

    @functools.wraps(original)
    def change(self: Any) -> Any:
        name = self._get_param("Attribute")
        if name is not None and name not in Instance.VALID_ATTRIBUTES:
            refuse(
                "InvalidParameterValue",
                f"Value ({name}) for parameter attribute is invalid. Unknown attribute.",
            )
        return original(self)

    return change


def _check_type(instance: Any, wanted: str) -> None:
    if wanted not in catalog.types():
        refuse("InvalidParameterValue", f"Invalid value '{wanted}' for InstanceType.")
    if instance.state != "stopped":
        refuse("IncorrectInstanceState", f"The instance '{instance.id}' is not in the 'stopped' state.")

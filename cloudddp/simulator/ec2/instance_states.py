"""StopInstances, StartInstances and the end of an instance: EC2's checks, for all instances of a request or
none.

A stopped instance frees its capacity, and needs capacity again to start. Termination releases everything
that an instance has, once, however often it is requested. The hosts behind the instances are stopped and
started in hosts/lifecycle.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cloudddp.simulator.ec2 import capacity, interfaces, reservations, spot
from cloudddp.simulator.ec2.patch import client_error, override


def install() -> None:
    """Patch moto's calls that stop, start and terminate instances."""
    from moto.ec2.models import EC2Backend
    from moto.ec2.models.instances import Instance

    override(Instance, "stop", _free_capacity)
    override(EC2Backend, "stop_instances", _stop)
    override(EC2Backend, "start_instances", _start)
    override(Instance, "terminate", _terminate)
    override(EC2Backend, "terminate_instances", _terminate_instances)


def _free_capacity(original: Callable[..., Any], self: Any) -> Any:
    capacity.release(self)
    reservations.leave(self)
    return original(self)


def _stop(original: Callable[..., Any], self: Any, instance_ids: list[str]) -> Any:
    instances = self.get_multi_instances_by_id(list(dict.fromkeys(instance_ids)))
    check_states(instances, ("pending", "running", "stopping", "stopped"), "stopped")
    for instance in instances:
        if spot.is_one_time(instance):
            client_error(
                "UnsupportedOperation",
                f"You can't stop the Spot Instance '{instance.id}' because it is associated with a "
                "one-time Spot Instance request. You can only stop Spot Instances associated with "
                "persistent Spot Instance requests.",
            )
    return original(self, instance_ids)


def _start(original: Callable[..., Any], self: Any, instance_ids: list[str]) -> Any:
    instances = self.get_multi_instances_by_id(list(dict.fromkeys(instance_ids)))
    check_states(instances, ("pending", "running", "stopped"), "started")
    _allocate_all(self, [instance for instance in instances if instance.state == "stopped"])
    return original(self, instance_ids)


def _allocate_all(backend: Any, instances: Iterable[Any]) -> None:
    """Allocate capacity for all instances, or fail the request."""
    allocated = []
    try:
        for instance in instances:
            launch = capacity.Launch(
                instance_type=instance.instance_type,
                zone=capacity.zone_of(instance),
                names_zone=True,
                spot=instance.lifecycle == "spot",
                min_count=1,
                max_count=1,
                addresses={},  # it has kept its own
            )
            capacity.grant(backend, launch)
            capacity.allocate(instance)
            allocated.append(instance)
    except Exception:
        for instance in allocated:
            capacity.release(instance)
        raise


def check_states(instances: Iterable[Any], allowed: tuple[str, ...], what: str) -> None:
    """Fail the request unless all instances are in one of the states. `what`: a participle, as "rebooted"."""
    for instance in instances:
        if instance.state not in allowed:
            client_error(
                "IncorrectInstanceState",
                f"The instance '{instance.id}' is not in a state from which it can be {what}.",
            )


def _terminate(original: Callable[..., Any], self: Any) -> Any:
    if self.state == "terminated":
        return self._state
    nics, self.nics = self.nics, {}  # moto would delete them
    previous = original(self)
    self.nics = nics
    interfaces.release(self)
    spot.close(self)
    capacity.release(self)
    reservations.leave(self)
    return previous


def _terminate_instances(original: Callable[..., Any], self: Any, instance_ids: list[str]) -> Any:
    return original(self, list(dict.fromkeys(instance_ids)))

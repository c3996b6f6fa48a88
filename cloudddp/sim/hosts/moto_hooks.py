"""Replaces the methods of moto's Instance and EC2Backend that start, end and list instances."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from cloudddp.sim.ec2.patch import LOCK
from cloudddp.sim.hosts.instance_state import set_state


class Hooks(Protocol):
    """What is called instead of moto's methods."""

    def launched(self, instances: list[Any]) -> None: ...

    def terminate(self, instance: Any) -> Any: ...

    def stop(self, instance: Any) -> Any: ...

    def start(self, instance: Any) -> Any: ...

    def reboot(self, instance: Any) -> None: ...

    def visible(self, reservation: Any) -> Any | None: ...


def install(hooks: Hooks) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Install the hooks. Return moto's own Instance.terminate and Instance.stop."""
    from moto.ec2.models import EC2Backend
    from moto.ec2.models.instances import Instance

    originals = Instance.terminate, Instance.stop
    create, launch, list_all = Instance.__init__, EC2Backend.run_instances, EC2Backend.all_reservations

    @functools.wraps(create)
    def created_pending(instance: Any, *args: Any, **kwargs: Any) -> None:
        create(instance, *args, **kwargs)
        set_state(instance, "pending")

    @functools.wraps(launch)
    def run_instances(backend: Any, *args: Any, **kwargs: Any) -> Any:
        with LOCK:
            reservation = launch(backend, *args, **kwargs)
            hooks.launched(reservation.instances)
        return reservation

    @functools.wraps(list_all)
    def all_reservations(backend: Any, *args: Any, **kwargs: Any) -> Any:
        return [kept for one in list_all(backend, *args, **kwargs) if (kept := hooks.visible(one))]

    methods: dict[str, Callable[..., Any]] = {
        "__init__": created_pending,
        "terminate": hooks.terminate,
        "stop": hooks.stop,
        "start": hooks.start,
        "reboot": hooks.reboot,
    }
    for name, method in methods.items():
        setattr(Instance, name, _function(method))
    for name, function in (("run_instances", run_instances), ("all_reservations", all_reservations)):
        setattr(EC2Backend, name, function)
    return originals


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    """As an attribute of a class, a plain function gets the instance as an argument; a bound method does not."""
    return lambda instance, *args, **kwargs: method(instance, *args, **kwargs)

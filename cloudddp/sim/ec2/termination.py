"""Termination of an instance: releases everything it has, once, however often it is requested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloudddp.sim.ec2 import capacity, interfaces, reservations, spot
from cloudddp.sim.ec2.patch import LOCK, override


def install() -> None:
    """Patch moto's termination."""
    from moto.ec2.models import EC2Backend
    from moto.ec2.models.instances import Instance
    from moto.ec2.responses._base_response import EC2BaseResponse

    override(Instance, "terminate", _terminate)
    override(EC2Backend, "terminate_instances", _terminate_instances)
    override(EC2BaseResponse, "call_action", _describe)


def _terminate(original: Callable[..., Any], self: Any) -> Any:
    with LOCK:
        if self.state == "terminated":
            return self._state
        previous = original(self)
        interfaces.release(self)
        spot.close(self)
        capacity.release(self)
        reservations.leave(self)
        return previous


def _terminate_instances(original: Callable[..., Any], self: Any, instance_ids: list[str]) -> Any:
    with LOCK:
        return original(self, list(dict.fromkeys(instance_ids)))


def _describe(original: Callable[..., Any], self: Any) -> Any:
    """Serve Describe calls with LOCK held: moto sets an instance's state first and its reason later."""
    if not self._get_action().startswith("Describe"):
        return original(self)
    with LOCK:
        return original(self)

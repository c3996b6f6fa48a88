"""The end of an instance: nothing of it is left, however often one asks, and it is shown with its reason.

Knows the rooms that gave the instance something, and takes it back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cloudddp.sim.ec2 import capacity, interfaces, spot
from cloudddp.sim.ec2.patch import LOCK, wrap


def install() -> None:
    """Put the clearing up around moto's termination."""
    from moto.ec2.models import EC2Backend
    from moto.ec2.models.instances import Instance
    from moto.ec2.responses._base_response import EC2BaseResponse

    wrap(Instance, "terminate", _terminate)
    wrap(EC2Backend, "terminate_instances", _terminate_instances)
    wrap(EC2BaseResponse, "call_action", _describe)


def _terminate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def terminate(self: Any) -> Any:
        with LOCK:
            if self.state == "terminated":
                return self._state
            previous = original(self)
            interfaces.release(self)
            spot.close(self)
            capacity.leave(self)
            return previous

    return terminate


def _terminate_instances(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def terminate(self: Any, instance_ids: list[str]) -> Any:
        with LOCK:
            return original(self, list(dict.fromkeys(instance_ids)))

    return terminate


def _describe(original: Callable[..., Any]) -> Callable[..., Any]:
    """Answer between changes only: moto sets an instance's state first and its reason later, without a lock."""

    @functools.wraps(original)
    def call(self: Any) -> Any:
        if not self._get_action().startswith("Describe"):
            return original(self)
        with LOCK:
            return original(self)

    return call

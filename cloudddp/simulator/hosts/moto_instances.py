"""moto's instances: sets their state and the reason for it, and replaces what starts, ends and lists them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from cloudddp.simulator.ec2.patch import override

# Errors that EC2 shows in the message only (github.com/hashicorp/packer/issues/12683).
_STATE_REASON_CODES = {"Client.InvalidKMSKey.InvalidState": "Client.InternalError"}
_CODES = {"pending": 0, "running": 16, "shutting-down": 32, "stopping": 64, "stopped": 80}


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
    override(Instance, "__init__", _create_pending)
    override(EC2Backend, "run_instances", functools.partial(_launch, hooks))
    override(EC2Backend, "all_reservations", functools.partial(_list, hooks))
    for name in ("terminate", "stop", "start", "reboot"):
        setattr(Instance, name, _function(getattr(hooks, name)))
    return originals


def _create_pending(original: Callable[..., None], instance: Any, *args: Any, **kwargs: Any) -> None:
    original(instance, *args, **kwargs)
    set_state(instance, "pending")


def _launch(hooks: Hooks, original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
    reservation = original(backend, *args, **kwargs)
    hooks.launched(reservation.instances)
    return reservation


def _list(hooks: Hooks, original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> list[Any]:
    found = original(backend, *args, **kwargs)
    return [kept for one in found if (kept := hooks.visible(one))]


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    """As an attribute of a class, a function gets the instance as an argument; a bound method does not."""
    return lambda instance, *args, **kwargs: method(instance, *args, **kwargs)


def set_state(instance: Any, name: str) -> None:
    # A new object each time: moto returns the old one as the previous state.
    instance._state = type(instance._state)(name, _CODES[name])


def set_reason(instance: Any, reason: str) -> None:
    """Set the reason ("code: message", or '') of a state that was not requested by a call."""
    code = reason.partition(":")[0]
    instance.state_reason.code, instance.state_reason.message = _STATE_REASON_CODES.get(code, code), reason
    instance._reason = ""  # StateTransitionReason, which is for calls only


def set_user_initiated(instance: Any) -> None:
    """Set the reason and time of TerminateInstances, which EC2 shows from the call on."""
    code = "Client.UserInitiatedShutdown"
    instance.state_reason.code, instance.state_reason.message = code, f"{code}: User initiated shutdown"
    instance._reason = f"User initiated ({datetime.now(UTC):%Y-%m-%d %H:%M:%S} GMT)"

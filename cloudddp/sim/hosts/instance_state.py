"""Sets the state of moto's instances, and the reasons for it that EC2 shows."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

# Errors that EC2 shows in the message only (github.com/hashicorp/packer/issues/12683).
_STATE_REASON_CODES = {"Client.InvalidKMSKey.InvalidState": "Client.InternalError"}
_CODES = {"pending": 0, "running": 16, "shutting-down": 32, "stopping": 64, "stopped": 80}


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


def require_state(instance: Any, allowed: tuple[str, ...], action: str) -> None:
    """Fail the request unless the instance is in one of the states. `action`: a participle, such as "rebooted"."""
    from moto.ec2.exceptions import EC2ClientError

    if instance.state not in allowed:
        raise EC2ClientError(
            "IncorrectInstanceState",
            f"The instance '{instance.id}' is not in a state from which it can be {action}.",
        )

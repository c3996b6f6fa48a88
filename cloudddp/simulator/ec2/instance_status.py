"""What DescribeInstanceStatus returns: the instance status check, and scheduled events.

EC2 sends ARP requests to a node for the check, which fails while the node is frozen or cut off (EC2 User
Guide, "Status checks for Amazon EC2 instances"). On AWS it takes some minutes to fail; here it fails at once.

Scheduled events take place, and the metadata service lists them too. Codes, the form in the metadata, and
what happens to an instance with an EBS root volume: EC2 User Guide, "Scheduled events for your instances" and
"Types of scheduled events". A spot instance that cannot be stopped is terminated.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from cloudddp.simulator.ec2.patch import wrap

REBOOT, STOP = "reboot", "stop"
# Code -> what is described, and what happens to the instance ('' for nothing).
CODES = {
    "instance-reboot": ("The instance is scheduled for reboot", REBOOT),
    "system-reboot": ("The host of the instance is scheduled for reboot", REBOOT),
    "system-maintenance": ("The instance may be affected by network or power maintenance", ""),
    "instance-retirement": ("The instance is running on degraded hardware", STOP),
    "instance-stop": ("The instance is scheduled to stop", STOP),
}
LENGTH = timedelta(hours=2)  # from the earliest time at which it begins until the latest


@dataclass(frozen=True, slots=True)
class ScheduledEvent:
    """An event of one instance. Times are in UTC."""

    id: str
    code: str
    description: str
    begins: datetime
    completed: bool = False

    @property
    def text(self) -> str:
        return ("[Completed] " if self.completed else "") + self.description

    @classmethod
    def of(cls, code: str, begins: datetime) -> ScheduledEvent:
        return cls(f"instance-event-0{secrets.token_hex(8)}", code, CODES[code][0], begins)


def schedule(instance: Any, event: ScheduledEvent) -> None:
    instance.scheduled_events = (*events_of(instance), event)
    _show(instance)


def complete(instance: Any, event: ScheduledEvent) -> None:
    """Mark an event as completed, as it is listed for a week."""
    done = replace(event, completed=True)
    instance.scheduled_events = tuple(done if one == event else one for one in events_of(instance))
    _show(instance)


def events_of(instance: Any) -> tuple[ScheduledEvent, ...]:
    found: tuple[ScheduledEvent, ...] = getattr(instance, "scheduled_events", ())
    return found


def _show(instance: Any) -> None:
    """Set what DescribeInstanceStatus returns."""
    instance.events = [
        {
            "InstanceEventId": one.id,
            "Code": one.code,
            "Description": one.text,
            "NotBefore": one.begins,
            "NotAfter": one.begins + LENGTH,
        }
        for one in events_of(instance)
    ]


def events_in_metadata(instance: Any, *, completed: bool) -> list[dict[str, str]]:
    """Return the events as `events/maintenance/scheduled` has them, or the completed ones: `history`."""
    return [
        {
            "NotBefore": _moment(one.begins),
            "Code": one.code,
            "Description": one.text,
            "EventId": one.id,
            "NotAfter": _moment(one.begins + LENGTH),
            "State": "completed" if one.completed else "active",
        }
        for one in events_of(instance)
        if one.completed is completed
    ]


def _moment(at: datetime) -> str:
    return at.strftime("%d %b %Y %H:%M:%S GMT")


def install() -> None:
    """Patch what DescribeInstanceStatus returns of an instance."""
    from moto.ec2.models.instances import Instance

    wrap(Instance, "instance_status", _checked)


def set_failing(instance: Any, failing: bool) -> None:
    instance.failing_since = datetime.now(UTC) if failing else None


def _checked(original: property) -> property:
    def instance_status(instance: Any) -> Any:
        since = getattr(instance, "failing_since", None)
        if since is None or instance.state != "running":
            return original.__get__(instance)
        detail = {"Name": "reachability", "Status": "failed", "ImpairedSince": since}
        return {"Details": [detail], "Status": "impaired"}

    return property(instance_status)

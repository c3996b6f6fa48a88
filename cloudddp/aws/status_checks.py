"""What EC2's status checks and scheduled events say about instances that do not answer.

The instance status check fails where the instance's kernel or network does not answer ARP requests, the
system status check where its host is at fault (EC2 User Guide, "Status checks for Amazon EC2 instances").
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from cloudddp.aws.answers import Id, Record
from cloudddp.aws.client import AWS
from cloudddp.errors import CloudDDPError
from cloudddp.text import one_line

_FAILED = "impaired"
_SYSTEM = "a problem of its host or of the host's network, which AWS has to repair"
_COMPLETED = ("[Completed]", "[Canceled]")  # how the description of an event begins that is over


class _Detail(Record, frozen=True):
    impaired_since: datetime | None = None


class _Check(Record, frozen=True):
    status: str = ""
    details: tuple[_Detail, ...] = ()


class _Event(Record, frozen=True):
    code: str = ""
    description: str = ""
    not_before: datetime | None = None


class _Status(Record, frozen=True):
    instance_id: Id
    instance_status: _Check = _Check()
    system_status: _Check = _Check()
    events: tuple[_Event, ...] = ()


def problems(aws: AWS, ids: Iterable[str]) -> dict[str, str]:
    """Return the failed status checks and the scheduled events of running instances, in words, by id; nothing
    if EC2 does not answer. One AWS call."""
    try:
        found = aws.listed(
            "ec2", "describe_instance_status", "InstanceStatuses", _Status, InstanceIds=sorted(ids)
        )
    except CloudDDPError:  # the policy may lack the action; the error of the node itself is reported anyway
        return {}
    texts = {one.instance_id: "; ".join(_problems(one)) for one in found}
    return {instance: text for instance, text in texts.items() if text}


def _problems(one: _Status) -> Iterable[str]:
    for name, check, more in (
        ("instance", one.instance_status, ""),
        ("system", one.system_status, f": {_SYSTEM}"),
    ):
        if check.status == _FAILED:
            since = next((detail.impaired_since for detail in check.details if detail.impaired_since), None)
            yield (
                f"EC2's {name} status check has been "
                f"failing{f' since {since:%Y-%m-%d %H:%M} UTC' if since else ''}{more}"
            )
    for event in one.events:
        if not event.description.startswith(_COMPLETED):
            begins = f" at {event.not_before:%Y-%m-%d %H:%M} UTC" if event.not_before else ""
            yield f"AWS has scheduled {one_line(event.code, 40)}{begins} ({one_line(event.description, 200)})"

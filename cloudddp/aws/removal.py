"""Terminates instances and deletes other resources, and handles EC2's eventual consistency."""

from __future__ import annotations

import time
from collections.abc import Callable

from cloudddp import timings
from cloudddp.aws.answers import Answer, Id
from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import power_minutes
from cloudddp.aws.inventory import KINDS, Instance, Resource
from cloudddp.config import timing
from cloudddp.errors import AWSError, CloudDDPError
from cloudddp.text import one_line

POLL_SECONDS = 2.0
_UNKNOWN = "InvalidInstanceID.NotFound"
REFUSED = ("OperationNotPermitted", "UnauthorizedOperation")  # for one instance
_IN_USE = (
    "DependencyViolation",
    "InvalidGroup.InUse",
    "VolumeInUse",
    "IncorrectState",
    "InvalidParameterValue",  # "Network interface ... is currently in use"
    "InvalidNetworkInterface.InUse",
    "InvalidIPAddress.InUse",
    "InvalidPlacementGroup.InUse",
)


def terminate(aws: AWS, ids: list[str]) -> list[str]:
    """Call TerminateInstances until AWS has accepted every id; return the ids that it does not know.

    InvalidInstanceID.NotFound does not mean that an instance has ended: a new one may not be known yet (EC2,
    "Eventual consistency"), and one unknown id fails the whole batch. So unknown ids are tried again.
    """
    deadline = time.monotonic() + timing.current().unknown_id
    remaining = list(ids)
    while (remaining := _terminate_once(aws, remaining)) and time.monotonic() <= deadline:
        time.sleep(POLL_SECONDS)
    return remaining


def _terminate_once(aws: AWS, ids: list[str]) -> list[str]:
    """Return the ids that AWS does not know. If it refuses some, raise after the others have been tried.

    One id fails the whole call: an instance that does not exist, is protected, or may not be terminated by
    the caller (another user's, with this cluster's tags). The others are terminated nevertheless.
    """
    try:
        aws.call("ec2", "terminate_instances", InstanceIds=ids)
        return []
    except AWSError as error:
        if error.code not in (_UNKNOWN, *REFUSED) or (len(ids) < 2 and error.code != _UNKNOWN):
            raise
    if len(ids) == 1:
        return ids
    unknown: list[str] = []
    refused: AWSError | None = None
    for one in ids:
        try:
            unknown += _terminate_once(aws, [one])
        except AWSError as error:
            if error.code not in REFUSED:
                raise
            refused = error
    if refused is not None:
        raise refused
    return unknown


@timings.span("wait: nodes are terminated")
def wait_terminated(
    aws: AWS,
    look: Callable[[], list[Instance]],
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Instance]:
    """Wait until every instance that `look` returns is terminated; terminate live ones; return the remaining
    ones. The limit is that of the slowest type among them.

    botocore's waiter polls every 15 s and fails if an instance has already disappeared. One failed call (a
    network problem) does not end the wait; four in a row do. `progress` is called with the number of
    remaining instances.
    """
    began, minutes = time.monotonic(), power_minutes("", 0)
    pause, failures = 0.2, 0
    remaining: list[Instance] = []
    while True:
        try:
            remaining = [instance for instance in look() if instance.state != "terminated"]
            minutes = max([minutes, *(power_minutes(one.type, one.tags.gpus or 0) for one in remaining)])
            if live := [instance.id for instance in remaining if instance.live]:
                terminate(aws, live)
            failures = 0
        except AWSError as error:
            failures += 1
            if failures > 3 or error.code:
                raise
        if (not remaining and not failures) or time.monotonic() - began > minutes * timing.current().minute:
            return remaining
        progress(len(remaining))
        time.sleep(pause)
        pause = min(pause * 1.5, POLL_SECONDS)


def delete(aws: AWS, resource: Resource, *, new: bool = False) -> AWSError | None:
    """Try once to delete a resource. Return None if it is gone, else the error; see `in_use`.

    `new`: AWS may not know it yet (eventual consistency), so that NotFound does not mean that it is gone.
    """
    _, method, id_key, detail_key = KINDS[resource.kind]
    # Not the name of a key pair: that is a lock, which another cluster may hold by now.
    params = {id_key: resource.id}
    if resource.kind == "placement group":  # by name, the only way: it contains the cluster's id
        params = {detail_key: resource.detail}
    try:
        aws.call("ec2", method, **params)
    except AWSError as error:
        return None if _not_found(error) and not new else error
    return None


class _Interface(Answer, frozen=True):
    network_interface_id: Id
    description: str = ""
    status: str = ""


def users(aws: AWS, group_id: str) -> str:
    """Return the network interfaces that use a security group, in words; '' if there are none, or AWS does
    not say."""
    filters = [{"Name": "group-id", "Values": [group_id]}]
    try:
        found = aws.listed("describe_network_interfaces", _Interface, Filters=filters)
    except CloudDDPError:
        return ""
    shown = [
        f"{one.network_interface_id} ({one_line(one.description or one.status, 100)})" for one in found[:10]
    ]
    return f"{group_id} is used by network interface {', '.join(shown)}" if shown else ""


def _not_found(error: AWSError) -> bool:
    return ".NotFound" in error.code or error.code == "InvalidPlacementGroup.Unknown"


def in_use(error: AWSError) -> bool:
    """Return whether waiting helps: interfaces and volumes are released some time after their instance has
    ended, and new resources are not found for some time."""
    return error.code in _IN_USE or _not_found(error)

"""All time limits in one frozen record: when a node is quiet, when it is lost, how long to wait for AWS.

CLOUDDDP_TIME_SCALE multiplies all of them by one factor of at most 1, for tests: faults that take minutes to
detect are then detected in seconds. It is not documented for users.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from cloudddp.errors import UsageError

VARIABLE = "CLOUDDDP_TIME_SCALE"
SMALLEST_SCALE = 0.02


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. The defaults are what users get."""

    # Following a job (job/).
    heartbeat: float = 5.0  # interval of the agent's heartbeats
    quiet: float = 15.0  # without a heartbeat until a node is reported as not responding
    silence: float = 20.0  # without a heartbeat until a connection is considered broken
    ask_again: float = 15.0  # interval of the queries to AWS while a node is quiet
    ask_soon: float = 3.0  # the same in the first seconds after a connection has broken
    lost: float = 20.0  # of failed reconnects until a node is lost, while other nodes answer
    # Without a heartbeat until a node is lost, even if its connection is open, while others answer.
    overdue: float = 120.0
    offline: float = 300.0  # of failed reconnects while no node answers: probably this computer is offline
    reconnect: float = 1.0  # before each attempt to reconnect to a node
    reading: float = 2.0  # between two readings of what a node measures (`top`)
    bars: float = 5.0  # between two states of a line that a progress bar overwrites
    no_output: float = 60.0  # without output of any rank, until that is reported, and again after as long

    join: float = 20.0  # for the agents of a job to connect to each other, before ranks start
    alone: float = 120.0  # for ranks to connect to another node, before a node without connections is named
    straggler: float = 30.0  # for which a rank stays slower than the others, until it is reported

    look: float = 15.0  # between two looks of a node whether it is used, at most
    failed_launch: float = 600.0  # without a use, after a launch with --down has failed, until the nodes end

    copy: float = 3600.0  # in which a node copies results to S3, before it powers off
    copy_stalled: float = 60.0  # without progress until it gives up

    # SSH (ssh/).
    connect: float = 10.0  # for one attempt to connect, verify the host key and log in
    key: float = 120.0  # of refused keys until `up` gives up: cloud-init may still be writing the key
    reason: float = 5.0  # until `up` shows why nodes that boot cannot be reached yet
    unanswered: float = 60.0  # without any answer until `up` names the addresses that may connect
    keepalive: float = 15.0  # between two SSH keepalives
    dead: float = 45.0  # without any answer until a connection is closed
    # For a server to open a channel and start a command that has no time limit of its own.
    start: float = 60.0

    # Clusters (cluster/, cli/).
    in_use: float = 300.0  # until a security group is no longer in use
    settle: float = 15.0  # in which AWS may not find a new resource (eventual consistency)
    unknown_id: float = 30.0  # in which TerminateInstances may not find a new instance, likewise
    clean_up: float = 600.0  # until the places of ended instances return to a capacity reservation
    still_listed: float = 30.0  # in which AWS may still list a deleted resource, likewise
    unsaved_work: float = 5.0  # for all nodes to report, before `down`, results that were not pulled
    capacity_first: float = 15.0  # until the second attempt to launch, while no zone has capacity
    capacity_longest: float = 300.0  # between two attempts
    # Until `up` looks up image, price and its own address again, while it waits for capacity.
    refresh_interval: float = 600.0
    gpus: float = 60.0  # for a node that has booted to show its GPUs
    torch: float = 600.0  # for the first import of torch, from a cold disk, and the use of each GPU
    minute: float = 60.0  # of the minutes that a node may take to boot (ready_minutes)

    def scaled(self, factor: float) -> Timing:
        """Return the same limits, each multiplied by a factor."""
        return Timing(**{field.name: getattr(self, field.name) * factor for field in fields(self)})


def current() -> Timing:
    """Return the limits of this process. Raises UsageError unless the scale is a number from 0.02 to 1."""
    text = os.environ.get(VARIABLE, "1")
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not SMALLEST_SCALE <= scale <= 1:
        raise UsageError(
            f"{VARIABLE} is {text!r}", hint=f"set it to a number from {SMALLEST_SCALE:g} to 1, or unset it"
        )
    return Timing().scaled(scale)

"""Every time limit that decides when something counts as silent, lost or gone, in one frozen record.

CLOUDDDP_TIME_SCALE shortens all of them by one factor, for tests: a fault that takes minutes to be certain of then
takes seconds. It cannot lengthen them, and no documentation for users names it.
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
    heartbeat: float = 5.0  # between two heartbeats of an agent that is followed
    quiet: float = 15.0  # without a heartbeat, after which the user is told that a node is not responding
    silence: float = 30.0  # without a heartbeat, after which a connection counts as broken
    ask_again: float = 15.0  # between two requests to AWS while a node is quiet
    lost: float = 20.0  # of failed reconnecting, after which a node counts as lost while others answer
    overdue: float = (
        120.0  # without a heartbeat, after which a node is lost whatever its connection does, likewise
    )
    offline: float = 300.0  # the same when no node answers: then it is most likely this computer's network
    exit_barrier: float = 10.0  # torchrun may wait at its exit barrier after every rank has finished
    stop_again: float = 5.0  # after which a node that could not be told to stop is told again
    stop_reply: float = (
        30.0  # beyond its grace, for all nodes to confirm a stop before the job's end is reported
    )
    reconnect: float = 1.0  # before each attempt to reconnect to a node
    fail_grace: float = 5.0  # between SIGTERM and SIGKILL for the other ranks of a failed job, at most

    # SSH (ssh/).
    connect: float = 10.0  # for one attempt to connect, verify the host key and log in
    keepalive: float = 15.0  # between two SSH keepalives
    dead: float = 45.0  # without any answer, after which a connection is dead
    start: float = (
        60.0  # for a server to open a channel and start a command that has no time limit of its own
    )

    # Clusters (cluster/, cli/).
    in_use: float = 300.0  # for what uses a security group to let go of it
    settle: float = 15.0  # for which AWS may not find what it has just created (eventual consistency)
    unknown_id: float = 30.0  # for which TerminateInstances may not know a new instance, likewise
    still_listed: float = 30.0  # for which AWS may list what was deleted, likewise
    at_stake: float = 5.0  # for all nodes together to report, before `down`, what nobody has pulled
    gpus: float = 60.0  # for a node that has booted to show its GPUs

    def scaled(self, factor: float) -> Timing:
        """Return the same limits, each multiplied by a factor."""
        return Timing(**{field.name: getattr(self, field.name) * factor for field in fields(self)})


def current() -> Timing:
    """Return the limits of this process. Raises UsageError for a scale that is no number from 0.02 to 1."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return Timing()
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not SMALLEST_SCALE <= scale <= 1:
        raise UsageError(
            f"{VARIABLE} is {text!r}", hint=f"set it to a number from {SMALLEST_SCALE:g} to 1, or unset it"
        )
    return Timing().scaled(scale)

"""What to do next about a job that is followed. Pure: a state and a policy in, one action out.

The follower executes the action, which changes the state, and calls again. It never ends ranks: the agents of
a job do that among themselves, whether or not anybody follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cloudddp.config.timing import Timing, current
from cloudddp.job.follow.state import FollowState


@dataclass(frozen=True, slots=True)
class Policy:
    """`wait`: until the job ends; otherwise read the logs as they are."""

    wait: bool = True
    timing: Timing = field(default_factory=current)


@dataclass(frozen=True, slots=True)
class Continue:
    """Wait for the next event."""


@dataclass(frozen=True, slots=True)
class AskAws:
    """Query AWS for the state of the instances of nodes that are quiet or disconnected."""

    nodes: frozenset[int]


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing is left to wait for: return the result."""


Action = Continue | AskAws | Done


def decide(state: FollowState, policy: Policy, now: float) -> Action:
    """Return the next action. `now` is of the clock of Liveness."""
    if not state.followed or state.faulty is not None:
        return Done()
    # The nodes have agreed how the job ended, without those that are silent, also on a new connection; AWS
    # may know why.
    asked = state.aws_asked_at is not None and not state.aws_pending
    if state.agreed is not None and state.followed <= state.quiet & state.retried and asked:
        return Done()
    doubtful = state.quiet | state.disconnected.keys() | _named(state)
    if (
        doubtful
        and not state.aws_pending
        and _elapsed(state.aws_asked_at, now) >= _interval(state, policy, now)
    ):
        return AskAws(doubtful)
    return Continue()


def _named(state: FollowState) -> frozenset[int]:
    """Return the node that the others have lost, by their verdict, while it is followed. When an instance
    ends, it may close no connection, and would be quiet only much later."""
    return state.followed & frozenset(() if state.suspect is None else (state.suspect,))


def _interval(state: FollowState, policy: Policy, now: float) -> float:
    """Return how long to wait for the next query. An instance that has just broken its connection is about to
    end, or has only lost the network."""
    if _named(state):
        return policy.timing.ask_soon
    latest = max(state.disconnected.values(), default=None)
    if _elapsed(latest, now) < policy.timing.ask_again:
        return policy.timing.ask_soon
    return policy.timing.ask_again


def _elapsed(since: float | None, now: float) -> float:
    return float("inf") if since is None else now - since

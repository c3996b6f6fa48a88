"""What to do next about a job that is followed. Pure: a state and a policy in, one action out.

The follower executes the action, which changes the state, and calls again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cloudddp.config.timing import Timing, current
from cloudddp.job import outcome
from cloudddp.job.follow.events import StopRequest
from cloudddp.job.follow.state import FollowState, StopStatus


@dataclass(frozen=True, slots=True)
class Policy:
    """What the follower does on its own. Only the launch that started a job should stop it when a node is lost:
    where a second terminal follows the job, that computer's own network may be at fault."""

    grace: float  # seconds between SIGTERM and SIGKILL that the user's settings give ranks
    stop_on_failure: bool = False  # stop the job on every node when a rank fails
    stop_on_loss: bool = False  # stop the job on every node when a node is lost
    wait: bool = True  # until the job ends; otherwise read the logs as they are
    timing: Timing = field(default_factory=current)


@dataclass(frozen=True, slots=True)
class Continue:
    """Wait for the next event."""


@dataclass(frozen=True, slots=True)
class StopJob:
    """Stop the job on every node."""

    grace: float  # seconds between SIGTERM and SIGKILL
    why: Literal["rank failed", "node lost"]


@dataclass(frozen=True, slots=True)
class EndExitBarrier:
    """Stop torchrun, which still waits for its peers after every rank has finished; the ranks' outcome is kept."""


@dataclass(frozen=True, slots=True)
class StopAgain:
    """Repeat the stop on nodes that could not be reached: otherwise the job would run on there."""

    request: StopRequest
    nodes: frozenset[int]


@dataclass(frozen=True, slots=True)
class AskAws:
    """Query AWS for the state of the instances of quiet nodes."""

    nodes: frozenset[int]


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing is left to wait for, or a node does not end its stream after a stop: return the verdict."""


Action = Continue | StopJob | EndExitBarrier | StopAgain | AskAws | Done


def decide(state: FollowState, policy: Policy, now: float) -> Action:
    """Return the next action. `now` is of the monotonic clock.

    A gang restart will be one more action here: stop the job everywhere as now, and if the policy allows another
    attempt, return Restart instead of Done.
    """
    if state.stop is None and (why := _reason_to_stop(state, policy)):
        return StopJob(min(policy.grace, policy.timing.fail_grace), why)
    if not state.followed:
        return Continue() if _awaits_stop(state, policy, now) else Done()
    if state.stop is None and _waits_at_exit_barrier(state, policy, now):
        return EndExitBarrier()
    if state.stop is not None and (unreached := _to_stop_again(state, policy, now)):
        return StopAgain(state.stop, unreached)
    if _end_is_overdue(state, policy, now):
        return Done()
    if state.quiet and not state.aws_pending and _elapsed(state.aws_asked_at, now) >= policy.timing.ask_again:
        return AskAws(state.quiet)
    return Continue()


def _reason_to_stop(state: FollowState, policy: Policy) -> Literal["rank failed", "node lost"] | None:
    # If every node is lost, this computer is probably offline and the job still runs.
    if policy.stop_on_loss and state.lost and (not state.all_lost or state.faulty is not None):
        return "node lost"
    if policy.stop_on_failure and outcome.has_failed(state.jobs.values()):
        return "rank failed"
    return None


def _awaits_stop(state: FollowState, policy: Policy, now: float) -> bool:
    """Whether to wait for replies to a stop, so that the verdict can list the nodes on which processes may be left."""
    longest = policy.grace + policy.timing.stop_reply
    return state.stop_pending and _elapsed(state.closed_at, now) < longest


def _waits_at_exit_barrier(state: FollowState, policy: Policy, now: float) -> bool:
    since = state.ranks_finished_at
    return policy.wait and since is not None and now - since > policy.timing.exit_barrier


def _to_stop_again(state: FollowState, policy: Policy, now: float) -> frozenset[int]:
    if state.stop_pending or _elapsed(state.stop_ended_at, now) <= policy.timing.stop_again:
        return frozenset()
    return frozenset(node for node in state.followed if state.nodes[node].stop is StopStatus.UNREACHED)


def _end_is_overdue(state: FollowState, policy: Policy, now: float) -> bool:
    """Whether the nodes that are still followed do not end their streams, although the job was stopped: a process
    cannot be killed there, or the agent was replaced. A quiet node responds again or is lost."""
    if state.stop is None or state.stop_pending or state.quiet:
        return False
    return _elapsed(state.stop_advanced_at, now) > policy.grace + policy.timing.stop_reply


def _elapsed(since: float | None, now: float) -> float:
    return float("inf") if since is None else now - since

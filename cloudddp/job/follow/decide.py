"""What to do next about a job that is followed: a state in, one action out. Pure.

The follower executes the action, which changes the state, and calls again. It never ends ranks: the agents of
a job do that among themselves, whether or not anybody follows. A silent node counts as quiet, then as lost.
Times are by the clock of Liveness (stream.py), which stands still while this process does not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, auto

from cloudddp.agent.protocol.progress import TrainingStatus
from cloudddp.config.timing import Timing
from cloudddp.job import outcome
from cloudddp.job.follow.events import BarsDue, NodeLost, NodeQuiet, NodeResponding, Silence
from cloudddp.job.follow.state import FollowState


def liveness_changes(
    state: FollowState, last_seen: Mapping[int, float], *, now: float, wall: float, timing: Timing
) -> Iterator[NodeQuiet | NodeResponding | NodeLost]:
    """Yield the nodes that became quiet, respond again, or are lost, from when each one last responded. One
    that is silent for `timing.overdue` is lost even if its connection looks intact, provided that another one
    responds. `wall` is the time in seconds since the epoch."""
    quiet = {node for node in state.followed if now - last_seen.get(node, now) > timing.quiet}
    yield from (NodeQuiet(node) for node in sorted(quiet - state.quiet))
    yield from (NodeResponding(node) for node in sorted(state.quiet - quiet))
    if any(now - at < 2 * timing.heartbeat for at in last_seen.values()):
        for node in sorted(quiet):
            silence = now - last_seen[node]
            if silence > timing.overdue:
                yield NodeLost(node, f"no heartbeat for {timing.overdue:g} s", wall - silence)


def silence_due(state: FollowState, timing: Timing, now: float) -> Iterator[BarsDue | Silence]:
    """Yield what is due at `now`: bars every `timing.bars` seconds while there are any, a report of silence
    every `timing.no_output` seconds in which no rank has written anything."""
    if not state.followed or state.began_at is None:
        return
    logs = (log for node in state.nodes.values() for log in node.logs.values())
    if now - (state.bars_at or state.began_at) >= timing.bars and any(log.line.overwritten for log in logs):
        yield BarsDue()
    since = state.output_at or state.began_at
    is_silent = now - max(since, state.silence_at or since) >= timing.no_output
    if is_silent and state.agreed is None and not state.quiet:
        training = TrainingStatus.from_replies(job.training for job in state.jobs.values())
        progress = training.progress if training else ""
        yield Silence(now - since, state.output_rank, progress, outcome.exited_ranks(state.jobs))


class Action(Enum):
    """What to do next."""

    CONTINUE = auto()  # wait for the next event
    ASK_AWS = auto()  # for the state of the instances of nodes that are quiet or disconnected
    DONE = auto()  # nothing is left to wait for: return the result


def decide(state: FollowState, timing: Timing, now: float) -> Action:
    """Return the next action. `now` is of the clock of Liveness."""
    if not state.followed or state.faulty is not None:
        return Action.DONE
    # The nodes have agreed how the job ended, without those that are silent, also on a new connection; AWS
    # may know why.
    asked = state.aws_asked_at is not None and not state.aws_pending
    if state.agreed is not None and state.followed <= state.quiet & state.retried and asked:
        return Action.DONE
    # The node that the others have lost: when an instance ends, it may close no connection, and would be
    # quiet only much later.
    is_named = state.suspect in state.followed
    if state.aws_pending or not (is_named or state.quiet or state.disconnected):
        return Action.CONTINUE
    # An instance that has just broken its connection is about to end, or has only lost the network.
    latest = max(state.disconnected.values(), default=None)
    is_new = is_named or _elapsed(latest, now) < timing.ask_again
    is_due = _elapsed(state.aws_asked_at, now) >= (timing.ask_soon if is_new else timing.ask_again)
    return Action.ASK_AWS if is_due else Action.CONTINUE


def _elapsed(since: float | None, now: float) -> float:
    return float("inf") if since is None else now - since

"""When to show progress bars, and when to report that no rank has written anything. Pure. Times are
monotonic."""

from __future__ import annotations

from collections.abc import Iterator

from cloudddp.agent.protocol.training import TrainingStatus
from cloudddp.config.timing import Timing
from cloudddp.job import outcome
from cloudddp.job.follow.events import BarsDue, Silence
from cloudddp.job.follow.state import FollowState


def due(state: FollowState, timing: Timing, now: float) -> Iterator[BarsDue | Silence]:
    """Yield what is due at `now`: bars every `timing.bars` seconds while there are any, a report of silence
    every `timing.no_output` seconds in which no rank has written anything."""
    if not state.followed or state.began_at is None:
        return
    if now - (state.bars_at or state.began_at) >= timing.bars and _has_bars(state):
        yield BarsDue()
    since = state.output_at or state.began_at
    if (
        state.agreed is None
        and not state.quiet
        and now - max(since, state.silence_at or since) >= timing.no_output
    ):
        training = TrainingStatus.from_replies(job.training for job in state.jobs.values())
        progress = training.progress if training else ""
        yield Silence(now - since, state.output_rank, progress, outcome.exited_ranks(state.jobs))


def _has_bars(state: FollowState) -> bool:
    return any(log.line.overwritten for node in state.nodes.values() for log in node.logs.values())

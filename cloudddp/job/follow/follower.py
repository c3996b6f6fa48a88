"""Follows a job on all its nodes: reports its log lines, and returns how it ended.

A thread per node reads; the caller's thread handles the events, so that Ctrl-C takes effect at once. The
caller decides how lines are shown.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field

from cloudddp import signals
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol import LAUNCHER_RANK, NOTE
from cloudddp.config.timing import Timing, current
from cloudddp.job.follow.decide import Action, decide, liveness_changes, silence_due
from cloudddp.job.follow.events import (
    AwsAsked,
    AwsReport,
    BarsDue,
    Event,
    EventQueue,
    NodeLost,
    NodeQuiet,
    NodeResponding,
    Silence,
)
from cloudddp.job.follow.state import FollowState, Line
from cloudddp.job.follow.stream import EVERYTHING, Connections, Liveness, LogSelection, NodeStream
from cloudddp.job.follow.verdict import JobResult, verdict

MOST_UNREPORTED = 5000  # lines: nobody may answer a question for days
POLL = 0.2  # seconds between two looks at the clock while nothing happens

OnLine = Callable[[int, int, str], None]  # node, rank, line
OnSilence = Callable[[Silence], None]
OnQuiet = Callable[[int, bool], None]  # node, whether it became quiet (else it responds again)
EndedInstances = Callable[[], Mapping[int, str]]  # node -> what AWS reports, for instances that have ended


@dataclass(slots=True)
class _Progress:
    """The position in the queue and the state there, in one record, so that an interrupt cannot separate
    them."""

    next: int  # the number of the next event in the queue
    state: FollowState
    unreported: deque[Line | NodeQuiet | NodeResponding | Silence] = field(default_factory=deque)


@dataclass(eq=False)
class JobFollower:
    """`ended_instances` is called in a thread while nodes are quiet, so that terminated ones are lost at
    once. `bars`: report lines that progress bars overwrite every few seconds. `wait`: until the job ends;
    otherwise read the logs as they are."""

    runner: Runner
    job: str
    nodes: Iterable[int]
    _: KW_ONLY
    on_line: OnLine
    on_quiet: OnQuiet = lambda _node, _quiet: None
    on_silence: OnSilence | None = None
    bars: bool = False
    wait: bool = True
    timing: Timing = field(default_factory=current)
    selection: LogSelection = EVERYTHING
    ended_instances: EndedInstances = dict

    def __post_init__(self) -> None:
        nodes = frozenset(self.nodes)
        self._queue = EventQueue()
        self._liveness = Liveness(nodes, self.timing)
        self._connections = Connections(self.runner, nodes)
        self._progress = _Progress(0, FollowState.of(nodes))
        self._streams = [
            NodeStream(
                node,
                self.job,
                wait=self.wait,
                connections=self._connections,
                liveness=self._liveness,
                emit=self._queue.put,
                timing=self.timing,
                selection=self.selection,
            )
            for node in sorted(nodes)
        ]

    def run(self, timeout: float | None = None) -> JobResult:
        """Follow the job to its end and return how it ended. Can be called again after an interrupt, to
        continue. Raises TimeoutError after `timeout` seconds."""
        for stream in self._streams:
            stream.start()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {self.job} has not ended after {timeout:g} s")
            now = self._liveness.clock()  # before a report, which lasts as long as the terminal is paused
            self._report()
            if self.has_ended(now):
                return verdict(self._state, self.job, time.time())

    def has_ended(self, now: float | None = None) -> bool:
        """Return whether the job has ended; if not, handle the next event without reporting it, for which it
        waits up to POLL seconds. The next `run` reports what has arrived, at most MOST_UNREPORTED lines.
        `now`: by the clock of `_liveness`."""
        action = decide(self._state, self.timing, self._liveness.clock() if now is None else now)
        if action is Action.CONTINUE:
            self._advance()
        elif action is Action.ASK_AWS:
            self._ask_aws()
        return action is Action.DONE

    def close(self) -> None:
        """Stop reading, and replacing connections: replacing one closes the old one, which the caller may be
        using."""
        self._connections.close()
        self._queue.close()

    @property
    def _state(self) -> FollowState:
        return self._progress.state

    def _report(self) -> None:
        """Report lines and quiet nodes to the caller. An interrupt neither repeats a line nor loses one."""
        waiting = self._progress.unreported
        while waiting:
            with signals.whole():
                self._report_one(waiting[0])
                waiting.popleft()

    def _report_one(self, reported: Line | NodeQuiet | NodeResponding | Silence) -> None:
        match reported:
            case Line(node, rank, text):
                self.on_line(node, rank, text)
            case Silence() as silent:
                if self.on_silence is not None:
                    self.on_silence(silent)
            case NodeQuiet(node):
                self.on_quiet(node, True)
            case NodeResponding(node):
                self.on_quiet(node, False)

    def _advance(self) -> None:
        """Apply a change of liveness or what is due or else the next event, if one arrives in time."""
        if (change := self._change_of_liveness() or self._due()) is not None:
            self._apply(change)
            return
        number = self._progress.next
        event = self._queue.get(number, POLL)
        if event is not None:
            self._apply(event, number + 1)

    def _apply(self, event: Event, following: int | None = None) -> None:
        before = self._progress
        state = before.state.apply(event, self._liveness.clock())
        unreported = deque((*before.unreported, *state.lines))
        if before.unreported and len(unreported) > MOST_UNREPORTED:
            note = f"{NOTE}earlier lines are not shown here; the logs have all of them"
            unreported = deque((Line(0, LAUNCHER_RANK, note), *list(unreported)[-MOST_UNREPORTED // 2 :]))
        if isinstance(event, NodeQuiet | NodeResponding | Silence):
            unreported.append(event)
        # A single assignment: an interrupt comes before or after it.
        self._progress = _Progress(before.next if following is None else following, state, unreported)

    def _change_of_liveness(self) -> Event | None:
        if self._queue.backlogged:
            return None  # this side is slow: heartbeats wait behind the logs
        now, wall = self._liveness.clock(), time.time()
        last_seen, timing = self._liveness.last_seen, self.timing
        return next(liveness_changes(self._state, last_seen, now=now, wall=wall, timing=timing), None)

    def _due(self) -> BarsDue | Silence | None:
        if not self.wait:
            return None
        kinds = (BarsDue,) * self.bars + (Silence,) * (self.on_silence is not None)
        found = silence_due(self._state, self.timing, self._liveness.clock())
        return next((event for event in found if isinstance(event, kinds)), None)

    def _ask_aws(self) -> None:
        # The thread first: if an interrupt comes in between, the query is repeated, which is harmless.
        threading.Thread(target=self._query_ended_instances, daemon=True).start()
        self._apply(AwsAsked())

    def _query_ended_instances(self) -> None:
        ended: list[NodeLost] = []
        with contextlib.suppress(Exception):  # queried again while nodes are quiet
            for node, report in self.ended_instances().items():
                if node in self._state.nodes:
                    since = time.time() - self._liveness.silence(node)
                    ended.append(NodeLost(node, f"AWS reports {report}", since, instance_ended=True))
        self._queue.put(AwsReport(tuple(ended)))

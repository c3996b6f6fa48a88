"""Follows a job on all its nodes: reports its log lines, and returns how it ended. A thread per node reads;
the caller's thread handles the events, so that Ctrl-C takes effect within POLL
seconds."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field

from cloudddp import signals
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol import LAUNCHER_RANK, NOTE
from cloudddp.config.timing import Timing, current
from cloudddp.job.follow import events
from cloudddp.job.follow.decide import Action, decide, liveness_changes, silence_due
from cloudddp.job.follow.events import NodeQuiet, NodeResponding, Silence
from cloudddp.job.follow.state import FollowState, Line
from cloudddp.job.follow.stream import Connections, Liveness, LogSelection, NodeStream
from cloudddp.job.follow.verdict import JobResult, verdict

MOST_UNREPORTED = 5000  # lines: nobody may answer a question for days
POLL = 0.2  # seconds between two looks at the clock while nothing happens

OnLine = Callable[[int, int, str], None]  # node, rank, line
OnSilence = Callable[[Silence], None]
OnQuiet = Callable[[int, bool], None]  # node, whether it became quiet (else it responds again)
EndedInstances = Callable[[], Mapping[int, str]]  # node -> what AWS reports, for instances that have ended


@dataclass(eq=False)
class JobFollower:
    """`ended_instances` is called in a thread while nodes are quiet: terminated ones are lost at once.
    `bars`: report progress bars every few seconds. `wait`: until the job ends; else read the logs as they
    are."""

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
    selection: LogSelection = field(default_factory=LogSelection)
    ended_instances: EndedInstances = dict

    def __post_init__(self) -> None:
        nodes = frozenset(self.nodes)
        self._queue = events.EventQueue()
        self._liveness = Liveness(nodes, self.timing)
        self._connections = Connections(self.runner, nodes)
        self._state = FollowState.of(nodes)
        self._unreported: deque[Line | NodeQuiet | NodeResponding | Silence] = deque()
        self._unstarted = [
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
            for node in nodes
        ]

    def run(self, timeout: float | None = None) -> JobResult:
        """Follow the job to its end and return how it ended. Can be called again after an interrupt, to
        continue. Raises TimeoutError after `timeout` seconds."""
        with signals.whole():
            while self._unstarted:
                threading.Thread(target=self._unstarted.pop().run, daemon=True).start()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {self.job} has not ended after {timeout:g} s")
            now = self._liveness.clock()  # before a report, which lasts as long as the terminal is paused
            self._report()
            if self.advance(now):
                return verdict(self._state, self.job, time.time())

    def advance(self, now: float | None = None) -> bool:
        """Handle the next event, for which it waits up to POLL seconds; return True, without that, once the
        job has ended. The next `run` reports it (at most MOST_UNREPORTED lines). `now`: by `_liveness`."""
        with signals.whole():  # an interrupt neither repeats an event nor loses one
            action = decide(self._state, self.timing, self._liveness.clock() if now is None else now)
            if action is Action.CONTINUE:
                event = next(self._due(), None) or self._queue.get(POLL)
                if event is not None:
                    self._apply(event)
            elif action is Action.ASK_AWS:
                threading.Thread(target=self._query_ended_instances, daemon=True).start()
                self._apply(events.AwsAsked())
        return action is Action.DONE

    def close(self) -> None:
        """Stop reading, and replacing connections: the caller may be using the old ones."""
        self._connections.close()
        self._queue.close()

    def _report(self) -> None:
        """Report lines and quiet nodes to the caller. An interrupt neither repeats a line nor loses one."""
        while self._unreported:
            with signals.whole():
                match self._unreported[0]:
                    case Line(node, rank, text):
                        self.on_line(node, rank, text)
                    case Silence() as silent:
                        if self.on_silence is not None:
                            self.on_silence(silent)
                    case NodeQuiet(node) | NodeResponding(node) as changed:
                        self.on_quiet(node, isinstance(changed, NodeQuiet))
                self._unreported.popleft()

    def _apply(self, event: events.Event) -> None:
        self._state = self._state.apply(event, self._liveness.clock())
        is_waiting = bool(self._unreported)
        self._unreported += self._state.lines
        if is_waiting and len(self._unreported) > MOST_UNREPORTED:
            note = f"{NOTE}earlier lines are not shown here; the logs have all of them"
            newest = list(self._unreported)[-MOST_UNREPORTED // 2 :]
            self._unreported = deque((Line(0, LAUNCHER_RANK, note), *newest))
        if isinstance(event, NodeQuiet | NodeResponding | Silence):
            self._unreported.append(event)

    def _due(self) -> Iterator[events.Event]:
        now, wall = self._liveness.clock(), time.time()
        if not self._queue.backlogged:  # else this side is slow: heartbeats wait behind the logs
            last_seen, timing = self._liveness.last_seen, self.timing
            yield from liveness_changes(self._state, last_seen, now=now, wall=wall, timing=timing)
        kinds = (events.BarsDue,) * self.bars + (Silence,) * (self.on_silence is not None)
        if self.wait:
            found = silence_due(self._state, self.timing, now)
            yield from (event for event in found if isinstance(event, kinds))

    def _query_ended_instances(self) -> None:
        ended: list[events.NodeLost] = []
        with contextlib.suppress(Exception):  # queried again while nodes are quiet
            for node, report in self.ended_instances().items():
                if node in self._state.nodes:
                    since = time.time() - self._liveness.silence(node)
                    why = f"AWS reports {report}"
                    ended.append(events.NodeLost(node, why, since, instance_ended=True))
        self._queue.put(events.AwsReport(tuple(ended)))

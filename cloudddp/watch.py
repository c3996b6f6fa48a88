"""Following a job on all its nodes: merge the logs, learn the states, stop the rest when one rank has failed.

One thread a node reads the agent's frames and survives broken connections; the caller's thread merges them, so
Ctrl-C reaches it at once. What is printed, and how, is the caller's business.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from cloudddp import nodes
from cloudddp.errors import NodeError
from cloudddp.frames import Frame, Frames, Lines
from cloudddp.nodes import Runner
from cloudddp.protocol import ENDED, LAUNCHER, End, JobState, KillReply, Log, ProtocolError, failed_first
from cloudddp.standing import PREEMPTED, Standing, among
from cloudddp.text import one_line

BEAT = 5.0  # seconds between the agent's signs of life
ASK_AGAIN = 15.0  # seconds between two requests to AWS while a node is quiet
QUIET = 15.0  # seconds without a beat after which the user is told
SILENCE = 30.0  # seconds without a beat after which a connection counts as broken
LOST_AFTER = 20.0  # seconds of failed reconnecting after which a node counts as lost, while others answer
OVERDUE = (
    120.0  # seconds without a beat after which a node is lost whatever its connection makes of it, likewise
)
OFFLINE_AFTER = 300.0  # the same when no node answers: then it is this computer's network, most likely
EXIT_RACE = 10.0  # torchrun may linger at its exit barrier after every rank has finished
STOP_AGAIN = 5.0  # seconds after which a node is told to stop once more that could not be told
FAIL_GRACE = 5.0  # the others of a failed job get this long, at most, between SIGTERM and SIGKILL
LAST_LINES = 20
LAST_LINE_LENGTH = 4096  # characters; what is kept for a verdict is bounded whatever a rank writes
WAITING = 256  # frames of up to 64 KiB: a full queue holds the nodes back, by SSH's own flow control

OnLine = Callable[[int, int, str], None]  # node, rank, line
Fates = Callable[[], Mapping[int, str]]  # node -> what AWS says, of those whose instances have ended
OnQuiet = Callable[[int, bool], None]  # node, whether it is quiet or is heard again


@dataclass(frozen=True, slots=True)
class Lost:
    """A node with which contact was lost: why, and since when (seconds since the epoch)."""

    why: str
    since: float
    error: NodeError | None = None  # where the node is the cause, not the connection
    ended: bool = False  # AWS says that the instance has ended, so nothing of the job runs there any more


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended. `ended` is seconds since the epoch by its node's clock; signal is None or a number."""

    rank: int
    node: int
    exit_code: int
    signal: int | None
    ended: float


@dataclass(frozen=True, slots=True)
class Finished:
    """How a job ended. `cause` is one sentence for a person; `first` the rank that failed first, if any did."""

    job: str
    state: str
    exit_code: int
    ranks: int
    cause: str
    first: RankEnd | None
    last_lines: tuple[str, ...]
    survivors: dict[int, int] = field(default_factory=dict)  # node -> processes that could not be ended
    lost: tuple[int, ...] = ()  # nodes
    standing: Standing | None = None  # where the training was, if it told


class Watch:
    """Follows one job. `wait=False` reads what there is and returns."""

    def __init__(
        self,
        runner: Runner,
        job: str,
        nodes: Iterable[int],
        *,
        on_line: OnLine,
        on_quiet: OnQuiet = lambda _node, _quiet: None,
        wait: bool = True,
        fates: Fates = dict,
    ) -> None:
        """`fates` is called in a thread while nodes are quiet, so that a node which has ended is not waited for."""
        self._runner = runner
        self._fates = fates
        self._closed = False
        self._asking: threading.Thread | None = None
        self._asked = 0.0
        self._job = job
        self._on_line = on_line
        self._on_quiet = on_quiet
        self._quiet: set[int] = set()
        self._wait = wait
        self._events: queue.Queue[tuple[int, Frame | Lost]] = queue.Queue(WAITING)
        self._open = set(nodes)
        self._nodes = frozenset(self._open)
        self._reconnecting = {node: threading.Lock() for node in self._nodes}  # held while one is replaced
        self._heard: dict[int, float] = {}
        self._done: set[int] = set()  # nodes whose part of the job has ended, and been read to its end
        self._states: dict[int, JobState] = {}
        self._lost: dict[int, Lost] = {}
        self._lines: dict[tuple[int, int], Lines] = {}
        self._steady_since: dict[int, float] = {}
        self._tails: dict[tuple[int, int], deque[str]] = {}
        self._stopping: threading.Thread | None = None
        self._stop_words: tuple[str, ...] = ()
        self._stop_ended = 0.0
        self._survivors: dict[int, int] = {}
        self._all_done_since: float | None = None
        self._event: tuple[int, Frame | Lost] | None = None
        self._ready: deque[tuple[int, int, str]] = deque()
        self._followers = [
            threading.Thread(target=self._follow, args=(node,), daemon=True) for node in sorted(self._open)
        ]

    def run(
        self,
        *,
        stop_on_failure: bool,
        stop_on_loss: bool = False,
        grace: float = FAIL_GRACE,
    ) -> Finished:
        """Follow to the end and return how it ended; may be called again after an interrupt, and goes on.

        With `stop_on_failure` a rank's failure ends the job on every node, with `stop_on_loss` the loss of a node
        too: that is for the one who started the job, since a mere viewer's own network may be at fault.
        """
        for follower in self._followers:
            if follower.ident is None:
                follower.start()
        while True:
            self._show()
            if not self._open:
                break
            self._tell_quiet()
            self._ask_for_fates()
            self._stop_again()
            try:
                self._event = self._event or self._events.get(timeout=0.2)
            except queue.Empty:
                self._end_exit_race()
                continue
            self._take(*self._event)
            self._event = None  # not before: an interrupt in between must not lose it
            reachable = not self.offline and not self._all_ended
            lost = stop_on_loss and bool(self._lost) and (reachable or self._unreadable() is not None)
            failed = stop_on_failure and self._failed()
            if self._stopping is None and (lost or failed):
                self._stop("--grace", f"{min(grace, FAIL_GRACE):g}")
        if self._stopping is not None:
            self._stopping.join(grace + 30)
        return self._finished()

    def close(self) -> None:
        """Replace no connection from now on: what follows uses them, and to replace one is to close the old one."""
        self._closed = True
        for lock in self._reconnecting.values():
            with lock:
                pass  # one that was being replaced is in place

    def _reconnect(self, node: int) -> None:
        with self._reconnecting[node]:
            if self._closed:
                raise NodeError(f"node {node}: not followed any more")
            self._runner.reconnect(node)

    def _show(self) -> None:
        while self._ready:
            self._on_line(*self._ready.popleft())

    def _tell_quiet(self) -> None:
        if self._events.qsize() > WAITING // 2:
            return  # it is we who are slow: nothing can be heard while the queue is full
        now = time.monotonic()
        quiet = {node for node in self._open if now - self._heard.get(node, now) > QUIET}
        for node in sorted(quiet ^ self._quiet):
            if node in self._open:
                self._on_quiet(node, node in quiet)
        self._quiet = quiet
        heard = any(now - at < 2 * BEAT for at in self._heard.values())
        for node in quiet if heard else ():
            if now - self._heard[node] > OVERDUE:
                why = f"nothing was heard of it for {OVERDUE:g} s"
                with contextlib.suppress(queue.Full):  # who empties it is this thread
                    self._events.put_nowait((node, Lost(why, time.time() - (now - self._heard[node]))))

    def _ask_for_fates(self) -> None:
        """Ask AWS about quiet nodes, in a separate thread: it may be the laptop that has no network."""
        busy = self._asking is not None and self._asking.is_alive()
        if not self._quiet & self._open or busy or time.monotonic() - self._asked < ASK_AGAIN:
            return
        self._asked = time.monotonic()
        self._asking = threading.Thread(target=self._learn_fates, daemon=True)
        self._asking.start()

    def _learn_fates(self) -> None:
        with contextlib.suppress(Exception):  # asked again while it matters
            for node, fate in self._fates().items():
                if node in self._nodes:
                    silent = time.monotonic() - self._heard.get(node, time.monotonic())
                    self._events.put((node, Lost(f"AWS says {fate}", time.time() - silent, ended=True)))

    def _follow(self, node: int) -> None:
        """Read one node's frames into the queue; reconnect and go on where a connection broke."""
        offsets: dict[int, int] = {}
        broken_since: float | None = None
        self._heard[node] = time.monotonic()
        while True:
            frames = Frames()
            ended = False

            def keep(data: bytes, frames: Frames = frames) -> None:
                nonlocal ended, broken_since
                broken_since = None
                self._heard[node] = time.monotonic()
                self._steady_since.setdefault(node, time.monotonic())
                for frame in frames.feed(data):
                    if isinstance(frame, Log):
                        offsets[frame.rank] = frame.end
                    ended = ended or isinstance(frame, End)
                    self._events.put((node, frame))

            try:
                arguments = [
                    "--job",
                    self._job,
                    "--offsets",
                    json.dumps(offsets),
                    *(["--wait"] if self._wait else []),
                ]
                result = nodes.run_step(
                    self._runner, node, "follow", *arguments, timeout=SILENCE, on_stdout=keep
                )
                if ended:
                    self._done.add(node)
                    return
                raise NodeError(f"node {node}: {nodes.last_words(result)}")
            except ProtocolError as error:
                unreadable = nodes.unreadable(node, "follow", error)
                self._events.put((node, Lost(str(unreadable), time.time(), unreadable)))
                return
            except Exception as error:
                broken_since = broken_since or time.monotonic()
                self._steady_since.pop(node, None)
                final = "no job " in str(error) or time.monotonic() - broken_since > OFFLINE_AFTER
                if not self._wait or final or not self._try_again(node, broken_since):
                    # Not since the connection broke: a machine that fails in silence is missed later than what
                    # its peers make of it.
                    since = time.time() - (time.monotonic() - self._heard[node])
                    self._events.put((node, Lost(_why(error), since)))
                    return

    def _try_again(self, node: int, since: float) -> bool:
        """Reconnect until it works; give up when others have answered for a while and this one has not."""
        while True:
            time.sleep(1.0)
            hopeless = self._hopeless(node, since)
            try:
                self._reconnect(node)
                return True
            except Exception:
                if hopeless or self._closed:  # decided before this last attempt
                    return False

    def _hopeless(self, node: int, since: float) -> bool:
        for other in self._done.copy():
            self._sound(other)
        now = time.monotonic()
        steady = self._steady_since.copy().items()
        others = [at for n, at in steady if n != node and now - self._heard[n] < 2 * BEAT]
        if others:
            return now - max(since, min(others)) > LOST_AFTER
        return now - since > OFFLINE_AFTER

    def _sound(self, node: int) -> None:
        """Learn whether a node still answers that has nothing more to say of the job."""
        if time.monotonic() - self._heard[node] < BEAT:
            return
        try:
            self._runner.run(node, "true", command_timeout=BEAT)
            self._heard[node] = time.monotonic()
        except Exception:
            with contextlib.suppress(Exception):
                self._reconnect(node)

    def _take(self, node: int, event: Frame | Lost) -> None:
        if isinstance(event, Log):
            self._print(node, event.rank, event.data)
        elif isinstance(event, JobState):
            self._states[node] = event
        else:
            for rank in [rank for at, rank in self._lines if at == node]:
                self._print(node, rank, b"", last=True)
            if isinstance(event, Lost) and node in self._open:
                self._lost[node] = event
            self._open.discard(node)

    def _print(self, node: int, rank: int, data: bytes, *, last: bool = False) -> None:
        """Make the complete lines ready to print; what follows the last line break waits for its end."""
        lines = self._lines.setdefault((node, rank), Lines())
        tail = self._tails.setdefault((node, rank), deque(maxlen=LAST_LINES))
        for line in lines.feed(data, last=last):
            tail.append(line[:LAST_LINE_LENGTH])
            self._ready.append((node, rank, line))

    @property
    def offline(self) -> bool:
        """Whether contact with every node was lost: then it is this computer's network, most likely."""
        return len(self._lost) == len(self._nodes)

    @property
    def _all_ended(self) -> bool:
        return self.offline and all(lost.ended for lost in self._lost.values())

    def _unreadable(self) -> NodeError | None:
        """What is wrong with a node that answers, but not as the agent does; None where there is none."""
        return next((lost.error for lost in self._lost.values() if lost.error is not None), None)

    def _failed(self) -> bool:
        if any(state.stopping for state in self._states.values()):
            return False  # somebody is ending it already, and with a grace of their own
        for state in self._states.values():
            if state.state in ("failed", "lost", "cancelled"):
                return True
            if not state.restarts and any(rank.exit_code for rank in state.ranks):
                return True
        return False

    def _end_exit_race(self) -> None:
        """End torchrun where every rank of every node has finished and it still waits for its peers."""
        states = self._states
        done = self._wait and len(states) == len(self._open | set(states)) and all(
            len(state.ranks) == state.expected and all(rank.exit_code == 0 for rank in state.ranks)
            for state in states.values()
        )  # fmt: skip
        if not done or not self._open:
            self._all_done_since = None
            return
        self._all_done_since = self._all_done_since or time.monotonic()
        if self._stopping is None and time.monotonic() - self._all_done_since > EXIT_RACE:
            self._stop("--finished", "--grace", "1")

    def _stop(self, *arguments: str) -> None:
        """End the job on every node, beside the reading of its last lines."""

        def work() -> None:
            def one(node: int) -> KillReply:
                if node in self._lost:
                    self._runner.reconnect(node)  # one more try: what it runs may still be running
                return nodes.call(
                    self._runner, node, "kill", "--job", self._job, *arguments, answer=KillReply, timeout=60
                )

            outcome = self._runner.each(one, fatal=lambda _: False)
            self._survivors = {node: answer.left for node, answer in outcome.values.items() if answer.left}
            self._survivors.update(dict.fromkeys(outcome.errors, -1))
            self._stop_ended = time.monotonic()

        self._stop_words = arguments
        self._survivors = dict.fromkeys(self._nodes, -1)  # until they have answered
        self._stopping = threading.Thread(target=work, daemon=True)
        self._stopping.start()

    def _stop_again(self) -> None:
        """Go on where a node could not be told, and runs on: nothing else would ever end the watch."""
        if self._stopping is None or self._stopping.is_alive():
            return
        untold = {node for node in self._open if self._survivors.get(node) == -1}
        if untold and time.monotonic() - self._stop_ended > STOP_AGAIN:
            self._stop(*self._stop_words)

    # -- the verdict ---------------------------------------------------------------------------------------

    def _finished(self) -> Finished:
        ends = [
            RankEnd(rank.rank, node, rank.exit_code, rank.signal, rank.ended)
            for node, state in self._states.items()
            for rank in state.ranks
            if rank.exit_code is not None and rank.ended is not None
        ]
        first = min((end for end in ends if end.exit_code), key=lambda end: end.ended, default=None)
        state, code, cause, tail = self._verdict(first)
        lost = tuple(sorted(self._lost))
        return Finished(
            self._job,
            state,
            code,
            len(ends),
            cause,
            first,
            tail,
            dict(self._survivors),
            lost,
            self._standing(),
        )

    def _standing(self) -> Standing | None:
        return among(state.standing for state in self._states.values())

    def _verdict(self, first: RankEnd | None) -> tuple[str, int, str, tuple[str, ...]]:
        states = {node: state.state for node, state in self._states.items()}
        if unreadable := self._unreadable():
            return "failed", 1, unreadable.message, ()
        if self._all_ended:
            return "failed", 1, "its nodes have ended", ()
        if self.offline:
            return "unknown", 1, "contact with every node was lost; the job may still be running", ()
        lost_at = min((lost.since for lost in self._lost.values()), default=inf)
        if self._lost and not (first is not None and first.ended < lost_at):
            node = min(self._lost)
            lost = self._lost[node]
            silent = f"nothing has been heard of it for {time.time() - lost.since:.0f} s"
            return "failed", 1, f"node {node} was lost: {silent} ({lost.why})", ()
        if "cancelled" in states.values() and failed_first(self._states.values()) is None:
            return "cancelled", 130, "", ()
        if all(state == "succeeded" for state in states.values()):
            return "succeeded", 0, "", ()
        standing = self._standing()
        if first is not None and first.exit_code == PREEMPTED and standing is not None and standing.preempted:
            return "preempted", PREEMPTED, "its ranks were told to stop (SIGTERM)", ()
        if first is not None:
            how = f"was ended by signal {first.signal}" if first.signal else f"exited {first.exit_code}"
            tail = tuple(self._tails.get((first.node, first.rank), ()))
            return "failed", first.exit_code, f"rank {first.rank} on node {first.node} {how} first", tail
        running = [node for node, state in states.items() if state not in ENDED]
        if running:
            return "running", 0, "", ()
        return self._launcher_failed()

    def _launcher_failed(self) -> tuple[str, int, str, tuple[str, ...]]:
        """No rank failed, yet the job did: torchrun itself, or what was to be started, did not work."""
        bad = [(node, state) for node, state in self._states.items() if state.state != "succeeded"]
        node, worst = min(bad, key=lambda item: inf if item[1].ended is None else item[1].ended)
        why = (
            one_line(worst.error, LAST_LINE_LENGTH)
            or f"the launcher ended with {worst.exit_code} before its ranks had finished"
        )
        tail = tuple(self._tails.get((node, LAUNCHER), ()))
        return "failed", worst.exit_code or 1, f"node {node}: {why}", tail


def _why(error: Exception) -> str:
    return (error.reason if isinstance(error, NodeError) else "") or str(error)

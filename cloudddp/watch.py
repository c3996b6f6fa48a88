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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from cloudddp import nodes
from cloudddp.errors import NodeError
from cloudddp.frames import Frames, lines_of
from cloudddp.nodes import Runner
from cloudddp.standing import PREEMPTED, Standing, among

ENDED = ("succeeded", "failed", "cancelled", "lost")
LAUNCHER = -1  # the rank number under which torchrun's own output comes
BEAT = 5.0  # seconds between the agent's signs of life
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
WAITING = 256  # frames of up to 64 KiB: a full queue holds the nodes back, by SSH's own flow control

OnLine = Callable[[int, int, str], None]  # node, rank, line
OnQuiet = Callable[[int, bool], None]  # node, whether it is quiet or is heard again


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
    ) -> None:
        self._runner = runner
        self._job = job
        self._on_line = on_line
        self._on_quiet = on_quiet
        self._quiet: set[int] = set()
        self._wait = wait
        self._events: queue.Queue[tuple[int, tuple[Any, ...]]] = queue.Queue(WAITING)
        self._open = set(nodes)
        self._nodes = frozenset(self._open)
        self._heard: dict[int, float] = {}
        self._done: set[int] = set()  # nodes whose part of the job has ended, and been read to its end
        self._states: dict[int, dict[str, Any]] = {}
        self._lost: dict[int, tuple[str, float]] = {}  # node -> why, and since when (seconds since the epoch)
        self._partial: dict[tuple[int, int], bytearray] = {}
        self._steady_since: dict[int, float] = {}
        self._tails: dict[tuple[int, int], deque[str]] = {}
        self._stopping: threading.Thread | None = None
        self._stop_words: tuple[str, ...] = ()
        self._stop_ended = 0.0
        self._survivors: dict[int, int] = {}
        self._all_done_since: float | None = None
        self._event: tuple[int, tuple[Any, ...]] | None = None
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
            self._stop_again()
            try:
                self._event = self._event or self._events.get(timeout=0.2)
            except queue.Empty:
                self._end_exit_race()
                continue
            self._take(*self._event)
            self._event = None  # not before: an interrupt in between must not lose it
            lost = stop_on_loss and bool(self._lost) and not self.offline
            failed = stop_on_failure and self._failed()
            if self._stopping is None and (lost or failed):
                self._stop("--grace", f"{min(grace, FAIL_GRACE):g}")
        if self._stopping is not None:
            self._stopping.join(grace + 30)
        return self._finished()

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
                    self._events.put_nowait((node, ("lost", why, time.time() - (now - self._heard[node]))))

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
                    if frame[0] == "log":
                        offsets[frame[1]] = frame[2] + len(frame[3])
                    ended = ended or frame[0] == "end"
                    self._events.put((node, frame))

            try:
                arguments = [
                    "--job",
                    self._job,
                    "--offsets",
                    json.dumps(offsets),
                    *(["--wait"] if self._wait else []),
                ]
                command = nodes.command("follow", *arguments)
                result = self._runner.run(node, command, command_timeout=SILENCE, on_stdout=keep)
                if ended:
                    self._done.add(node)
                    return
                raise NodeError(f"node {node}: {nodes.last_words(result)}")
            except Exception as error:
                broken_since = broken_since or time.monotonic()
                self._steady_since.pop(node, None)
                final = "no job " in str(error) or time.monotonic() - broken_since > OFFLINE_AFTER
                if not self._wait or final or not self._try_again(node, broken_since):
                    # Not since the connection broke: a machine that fails in silence is missed later than what
                    # its peers make of it.
                    since = time.time() - (time.monotonic() - self._heard[node])
                    self._events.put((node, ("lost", _why(error), since)))
                    return

    def _try_again(self, node: int, since: float) -> bool:
        """Reconnect until it works; give up when others have answered for a while and this one has not."""
        while True:
            time.sleep(1.0)
            hopeless = self._hopeless(node, since)
            try:
                self._runner.reconnect(node)
                return True
            except Exception:
                if hopeless:  # decided before this last attempt
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
                self._runner.reconnect(node)

    def _take(self, node: int, event: tuple[Any, ...]) -> None:
        kind = event[0]
        if kind == "log":
            self._print(node, event[1], event[3])
        elif kind == "state":
            self._states[node] = event[1]
        elif kind in ("lost", "end"):
            for rank in [rank for at, rank in self._partial if at == node]:
                self._print(node, rank, b"", last=True)
            if kind == "lost":
                self._lost[node] = (event[1], event[2])
            self._open.discard(node)

    def _print(self, node: int, rank: int, data: bytes, *, last: bool = False) -> None:
        """Print the complete lines; what follows the last line break waits for its end."""
        waiting = self._partial.setdefault((node, rank), bytearray())
        cut = len(data) if last else data.rfind(b"\n") + 1
        if not cut and not last:
            waiting += data
            return
        complete = bytes(waiting) + data[:cut]
        self._partial[(node, rank)] = bytearray(data[cut:])
        tail = self._tails.setdefault((node, rank), deque(maxlen=LAST_LINES))
        for line in lines_of(complete) if complete else ():
            tail.append(line)
            self._ready.append((node, rank, line))

    @property
    def offline(self) -> bool:
        """Whether contact with every node was lost: then it is this computer's network, most likely."""
        return len(self._lost) == len(self._nodes)

    def _failed(self) -> bool:
        if any(state.get("stopping") for state in self._states.values()):
            return False  # somebody is ending it already, and with a grace of their own
        for state in self._states.values():
            if state["state"] in ("failed", "lost", "cancelled"):
                return True
            if not state.get("restarts") and any(record["exit_code"] for record in state["ranks"]):
                return True
        return False

    def _end_exit_race(self) -> None:
        """End torchrun where every rank of every node has finished and it still waits for its peers."""
        states = self._states
        done = self._wait and len(states) == len(self._open | set(states)) and all(
            len(state["ranks"]) == state.get("expected") and all(r["exit_code"] == 0 for r in state["ranks"])
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
            def one(node: int) -> Any:
                if node in self._lost:
                    self._runner.reconnect(node)  # one more try: what it runs may still be running
                return nodes.call(self._runner, node, "kill", "--job", self._job, *arguments, timeout=60)

            outcome = self._runner.each(one, fatal=lambda _: False)
            self._survivors = {
                node: answer["left"] for node, answer in outcome.values.items() if answer["left"]
            }
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
            RankEnd(r["rank"], node, r["exit_code"], r.get("signal"), r["ended"])
            for node, state in self._states.items()
            for r in state["ranks"]
            if r["exit_code"] is not None
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
            among(self._states.values()),
        )

    def _verdict(self, first: RankEnd | None) -> tuple[str, int, str, tuple[str, ...]]:
        states = {node: state["state"] for node, state in self._states.items()}
        if self.offline:
            return "unknown", 1, "contact with every node was lost; the job may still be running", ()
        lost_at = min((at for _, at in self._lost.values()), default=inf)
        if self._lost and not (first is not None and first.ended < lost_at):
            node = min(self._lost)
            why, last = self._lost[node]
            silent = f"nothing has been heard of it for {time.time() - last:.0f} s"
            return "failed", 1, f"node {node} was lost: {silent} ({why})", ()
        if "cancelled" in states.values():
            return "cancelled", 130, "", ()
        if all(state == "succeeded" for state in states.values()):
            return "succeeded", 0, "", ()
        standing = among(self._states.values())
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
        bad = [state for state in self._states.values() if state["state"] != "succeeded"]
        worst = min(bad, key=lambda state: float(state.get("ended") or 1e18))
        node = int(worst.get("node", 0))
        why = (
            worst.get("error")
            or f"the launcher ended with {worst.get('exit_code')} before its ranks had finished"
        )
        tail = tuple(self._tails.get((node, LAUNCHER), ()))
        return "failed", int(worst.get("exit_code") or 1), f"node {node}: {why}", tail


def _why(error: Exception) -> str:
    return (error.reason if isinstance(error, NodeError) else "") or str(error)

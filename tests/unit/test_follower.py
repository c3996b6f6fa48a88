"""The follower with real threads: nodes that cannot be reached, interrupts at every moment, and
connections."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from support.jobstates import agreed, job, rank

from cloudddp import signals
from cloudddp.agent.program import step_of
from cloudddp.agent.protocol.frames import End, FollowRequest, Heartbeat, Log, encode_frame
from cloudddp.agent.protocol.jobs import Cause, Failure
from cloudddp.agent.protocol.readings import Reading
from cloudddp.agent.replies import decode
from cloudddp.config.timing import Timing
from cloudddp.errors import ConnectionLost, NodeError
from cloudddp.job.follow.follower import JobFollower
from cloudddp.job.follow.stream import LogSelection
from cloudddp.ssh.fleet import Outcome, each
from cloudddp.ssh.running import CommandSpec, Result

FAST = Timing().scaled(0.1)

Write = Callable[[bytes], None]


def running(node: int) -> bytes:
    return encode_frame(job("running", rank(node), node=node))


def ended(node: int, code: int) -> bytes:
    state = job("failed" if code else "succeeded", rank(node, code, time.time()), node=node, exit_code=code)
    return encode_frame(state) + encode_frame(End())


class Nodes:
    """Carries the agent's steps to nodes that are a function: `follow`.

    Only those that follow: it is the agents that end ranks."""

    def __init__(self, follow: Callable[[int, FollowRequest, Write], None], count: int = 2) -> None:
        self.follow = follow
        self.count = count
        self.followed: list[FollowRequest] = []
        self.reconnected: list[int] = []

    def connection(self, _node: int) -> None:
        return

    def run(self, node: int, spec: CommandSpec) -> Result:
        assert isinstance(spec.stdin, bytes)
        assert (step_of(spec.command), spec.on_stdout is not None) == (FollowRequest.STEP, True)
        assert spec.on_stdout is not None
        request = decode(spec.stdin.partition(b"\n")[0], FollowRequest)
        self.followed.append(request)
        self.follow(node, request, spec.on_stdout)
        return Result(0, b"", b"")

    def each(
        self, work: Callable[[int], Any], *, nodes: Iterable[int] | None = None, **more: Any
    ) -> Outcome[Any]:
        chosen = range(self.count) if nodes is None else nodes
        return each({node: partial(work, node) for node in chosen}, **more)

    def reconnect(self, node: int, wanted: Callable[[], bool] = lambda: True) -> None:  # noqa: ARG002
        self.reconnected.append(node)

    def close(self) -> None: ...

    def host_key(self, node: int) -> str:
        raise NotImplementedError

    def expect(self, node: int, host_key: str) -> None: ...


def follower(nodes: Nodes, *, lines: list[tuple[int, int, str]] | None = None, **options: Any) -> JobFollower:
    shown: list[tuple[int, int, str]] = [] if lines is None else lines
    chosen = {"timing": FAST, **options}
    return JobFollower(nodes, "j", range(nodes.count), on_line=lambda *line: shown.append(line), **chosen)


def test_lines_that_arrive_while_a_question_waits_are_limited() -> None:
    """And what was left out is named; elsewhere none is."""
    texts: list[str] = []

    def follow(_node: int, _request: FollowRequest, write: Write) -> None:
        offset = 0
        for size in (9000, 1, 3000, 3000):
            data = b"a line\n" * size
            write(encode_frame(Log(0, offset, data)))
            offset += len(data)
        write(ended(0, 0))

    def show(_node: int, _rank: int, text: str) -> None:
        texts.append(text)
        if len(texts) == 9000:
            raise KeyboardInterrupt

    found = JobFollower(Nodes(follow, 1), "j", range(1), timing=FAST, on_line=show)
    with pytest.raises(KeyboardInterrupt):
        found.run()
    while not found.advance():
        pass
    assert found.run().exit_code == 0
    assert [text for text in texts[:9000] if text != "a line"] == []
    (note,) = [text for text in texts if text != "a line"]
    assert "earlier lines are not shown here" in note
    assert 9000 + 2500 < len(texts) < 9000 + 6000


def test_quiet_node_is_not_awaited_once_the_others_have_agreed() -> None:
    """Node 1 hangs: it accepts connections, and nothing arrives."""
    closed = threading.Event()
    limits = Timing().scaled(0.02)

    def follow(node: int, request: FollowRequest, write: Write) -> None:
        if node == 0:
            first = Failure(1, Cause.SILENT, peer=0)
            write(encode_frame(job("failed", rank(0, 143), node=0, verdict=agreed("failed", first))) + END)
        elif not request.offsets and len(nodes.followed) < 3:
            write(running(1))
            closed.wait(limits.silence)
            raise NodeError("node 1: no answer")
        else:
            closed.wait(60)

    nodes = Nodes(follow)
    found = follower(nodes, timing=limits)
    results = []
    runner = threading.Thread(target=lambda: results.append(found.run()), daemon=True)
    runner.start()
    runner.join(60)
    closed.set()
    assert [(one.status, one.exit_code, one.unverified) for one in results] == [("failed", 1, (1,))]
    assert results[0].cause == "node 1 was lost: it sent nothing to node 0"


END = encode_frame(End())
OTHER_JOB = encode_frame(replace(job("succeeded", rank(1, 0)), job="another"))


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (END, "it ends without the job's state"),
        (running(1) + END, "it ends while the job is running"),
        (OTHER_JOB + END, "it has the state of job another"),
        (encode_frame(Reading(1.0)), "it has a frame of another step"),
    ],
    ids=["end without a state", "end while the job runs", "state of another job", "a reading"],
)
def test_stream_that_contradicts_itself_is_an_error_of_its_node(frames: bytes, why: str) -> None:
    def follow(node: int, request: FollowRequest, write: Write) -> None:
        write(frames if node == 1 else ended(0, 0))

    result = follower(Nodes(follow)).run()
    assert (result.status, result.exit_code, result.lost) == ("failed", 1, (1,))
    assert result.cause.startswith("node 1 sent an answer that cloudddp cannot read")
    assert result.cause.endswith(why)


def test_what_follows_the_end_of_a_stream_is_ignored() -> None:
    success = ended(1, 0).removesuffix(END)
    nodes = Nodes(lambda node, _, write: write(ended(node, 3) + (success if node else b"") * 2))
    result = follower(nodes).run()
    assert (result.status, result.exit_code, result.ranks) == ("failed", 3, 2)


def test_plain_logs_of_a_running_job_do_not_wait_and_are_complete() -> None:
    nodes = Nodes(lambda node, _, write: write(running(node) + END))
    result = follower(nodes, wait=False).run()
    assert (result.status, result.lost, result.unverified) == ("running", (), ())
    assert [request.wait for request in nodes.followed] == [False, False]


def test_following_resumes_after_a_broken_connection() -> None:
    def follow(node: int, request: FollowRequest, write: Write) -> None:
        if not request.offsets:
            write(encode_frame(Log(node, 0, b"one\ntw")))
            raise NodeError("the SSH connection broke")
        assert request.offsets == {node: 6}
        write(encode_frame(Log(node, 6, b"o\nthree\n")) + ended(node, 0))

    nodes = Nodes(follow)
    lines: list[tuple[int, int, str]] = []
    result = follower(nodes, lines=lines).run()
    assert (result.status, sorted(nodes.reconnected)) == ("succeeded", [0, 1])
    for node in (0, 1):
        assert [text for at, _, text in lines if at == node] == ["one", "two", "three"]


def test_broken_connection_does_not_select_the_last_lines_again() -> None:
    """A log that appears after the first state is sent from its beginning, also over the next connection."""
    asked: list[tuple[int | None, float | None, dict[int, int]]] = []
    shown: list[Any] = []

    def follow(node: int, request: FollowRequest, write: Write) -> None:
        asked.append((request.tail, request.since, request.offsets))
        if len(asked) == 1:
            write(encode_frame(Log(7, 100, b"")))
            raise OSError("connection lost")
        if len(asked) == 2:
            after = encode_frame(Log(7, 150, b"after a gap\n"))
            write(encode_frame(Log(7, 100, b"")) + running(node) + after)
            raise OSError("connection lost")
        write(ended(node, 0))

    selection = LogSelection(ranks=(7,), since=60.0, tail=5)
    assert follower(Nodes(follow, count=1), lines=shown, selection=selection).run().exit_code == 0
    assert [text for *_, text in shown] == ["after a gap"]
    assert asked == [(5, 60.0, {}), (5, 60.0, {7: 100}), (None, None, {7: 162})]


def test_close_prevents_reconnects() -> None:
    followed = threading.Event()

    def follow(node: int, request: FollowRequest, write: Write) -> None:
        followed.set()
        raise NodeError("the SSH connection broke")

    nodes = Nodes(follow, count=1)
    found = follower(nodes)
    stopped = threading.Thread(target=found.run, daemon=True)
    found.close()
    stopped.start()
    assert followed.wait(10)
    stopped.join(10)
    assert not stopped.is_alive()
    assert nodes.reconnected == []


def test_interrupt_while_a_line_is_shown_does_not_repeat_it(armed: None) -> None:
    def follow(node: int, request: FollowRequest, write: Write) -> None:
        write(encode_frame(Log(node, 0, b"one\ntwo\nthree\n")))
        write(ended(node, 0))

    def show(node: int, rank: int, text: str) -> None:
        shown.append(text)
        os.kill(os.getpid(), signal.SIGINT)

    shown: list[str] = []
    found = JobFollower(Nodes(follow, count=1), "j", [0], timing=FAST, on_line=show)
    for _ in range(3):
        signals.arm()
        with pytest.raises(KeyboardInterrupt):
            found.run()
    signals.arm()
    assert found.run().exit_code == 0
    assert shown == ["one", "two", "three"]


@pytest.fixture
def armed() -> Iterator[None]:
    """Put back the handlers of the signals that a test has armed."""
    before = {number: signal.getsignal(number) for number in (*signals.EXCEPTIONS, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_job_is_followed_to_its_end_without_a_node_that_is_lost() -> None:
    """Node 1 is lost to this computer; the agents end the job only where they lose it, too."""

    def follow(node: int, request: FollowRequest, write: Write) -> None:
        if node == 1:
            write(running(1))
            raise ConnectionLost("connection reset", "node 1: the SSH connection broke")
        write(running(0))
        for _ in range(int(2 * FAST.lost / 0.05)):
            write(encode_frame(Heartbeat()))
            time.sleep(0.05)
        write(ended(0, 143))

    class OneUnreachable(Nodes):
        def reconnect(self, node: int, wanted: Callable[[], bool] = lambda: True) -> None:
            super().reconnect(node, wanted)
            raise ConnectionLost("no route to host")

    result = follower(OneUnreachable(follow)).run()
    assert (result.status, result.exit_code, result.lost, result.unverified) == ("failed", 1, (1,), ())
    assert result.cause.startswith("node 1 was lost: not responding for ")
    assert result.cause.endswith("(connection reset)")


def test_close_does_not_wait_for_a_node_that_does_not_answer() -> None:
    """An attempt to connect to an instance that has ended takes as long as its time limit."""
    connecting, closed, unwanted = threading.Event(), threading.Event(), threading.Event()

    def follow(node: int, request: FollowRequest, write: Write) -> None:
        raise NodeError("the SSH connection broke")

    class Unanswered(Nodes):
        def reconnect(self, node: int, wanted: Callable[[], bool] = lambda: True) -> None:
            self.reconnected.append(node)
            connecting.set()
            assert closed.wait(10)
            if not wanted():
                unwanted.set()
            raise NodeError("no longer wanted")

    found = follower(Unanswered(follow, count=1))
    threading.Thread(target=found.run, daemon=True).start()
    assert connecting.wait(10)
    closing = threading.Thread(target=found.close, daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive()
    closed.set()
    assert unwanted.wait(10)

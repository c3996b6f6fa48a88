"""The agents of several nodes that run one job: real processes, real signals, real connections. Whatever ends, all ranks
end with it, and every node keeps the same verdict."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.agentnode import FOREVER, HANG_GUARD, alive, free_port, gang_of, until
from support.gangs import Gangs, freeze, kill, thaw

from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.gang import Gang, Peer
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Process
from cloudddp.agent.protocol.verdict import MAX_LINES, Cause, Failure, Verdict

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

TALKING = "for number in range(60): print('line', number, flush=True)\n"
LAST_LINES = tuple(f"line {number}" for number in range(60 - MAX_LINES, 60))
STUBBORN = (
    "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\n" + FOREVER
)
WAITING = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\n"

Make = Callable[..., Gangs]


@pytest.fixture
def gangs(tmp_path: Path) -> Iterator[Make]:
    made: list[Gangs] = []

    def make(nodes: int, **limits: float) -> Gangs:
        made.append(Gangs(tmp_path / str(len(made)), nodes, **limits))
        return made[-1]

    yield make
    assert [pid for one in made for pid in one.end()] == []


def launched(code: str, node: Gangs, number: int, rank: int) -> list[Process]:
    """A rank below a launcher that waits for it, as torchrun does, and ends with its exit code."""
    script = node[number].script(code)
    return [Process(("sh", "-c", '"$@"; exit $?', "sh"), (sys.executable, script), {"RANK": str(rank)})]


# -- a rank ------------------------------------------------------------------------------------------------------


def test_job_succeeds_once_every_rank_of_every_node_has_exited_with_0(gangs: Make) -> None:
    job = gangs(3)
    replies = job.start(["pass", "pass"], "pass", "pass")
    assert [reply.unreachable for reply in replies.values()] == [None] * 3
    assert job.verdict() == Verdict(JobPhase.SUCCEEDED, 0, 0)
    assert [[rank.exit_code for rank in state.ranks] for state in job.states()] == [[0, 0], [0], [0]]


def test_killed_rank_ends_all_ranks(gangs: Make) -> None:
    job = gangs(3)
    job.start([FOREVER] * 2, [FOREVER, TALKING + FOREVER], FOREVER)
    until(lambda: b"line 59" in job.log(1, 3))
    ranks = [pid for number in range(3) for pid in job.pids(number).ranks]
    os.kill(job.pid(1, 3), signal.SIGKILL)
    first = Failure(1, Cause.RANK, 3, 137, signal.SIGKILL)
    assert job.verdict() == Verdict(JobPhase.FAILED, 137, 0, first, LAST_LINES)
    assert not any(map(alive, ranks))


@pytest.mark.parametrize("failing", range(2))
def test_rank_that_fails_is_named_with_its_last_lines(gangs: Make, failing: int) -> None:
    job = gangs(2)
    code = TALKING + WAITING + "raise SystemExit(7)\n"
    job.start(*[code if number == failing else FOREVER for number in range(2)])
    job.pids(1 - failing)
    (job[failing].project / "go").touch()
    first = Failure(failing, Cause.RANK, failing, 7)
    assert job.verdict() == Verdict(JobPhase.FAILED, 7, 0, first, LAST_LINES)
    ended = {rank.rank: rank for state in job.states() for rank in state.ranks}
    assert (ended[1 - failing].signal, ended[1 - failing].asked) == (signal.SIGTERM, True)


def test_rank_that_ignores_sigterm_is_killed(gangs: Make) -> None:
    job = gangs(2)
    job.start(STUBBORN, FOREVER, grace=600.0)
    until(lambda: b"ready" in job.log(0, 0))
    os.kill(job.pid(1, 1), signal.SIGKILL)
    assert job.verdict().first == Failure(1, Cause.RANK, 1, 137, signal.SIGKILL)
    assert job.states(0)[0].ranks[0].signal == signal.SIGKILL


@pytest.mark.parametrize("code", [0, 3])
def test_job_goes_on_after_a_rank_that_exits_with_0(gangs: Make, code: int) -> None:
    job = gangs(2)
    job.start("pass", WAITING + f"raise SystemExit({code})\n")
    until(lambda: [rank.exit_code for rank in job[0].state().ranks] == [0])
    supervisors = [job[number].supervisor_pid() for number in (0, 1)]
    assert alive(job.pid(1, 1))
    assert all(map(alive, supervisors))
    (job[1].project / "go").touch()
    first = Failure(1, Cause.RANK, 1, code) if code else None
    phase = JobPhase.FAILED if code else JobPhase.SUCCEEDED
    assert job.verdict() == Verdict(phase, code, 0, first)


def test_ranks_that_cannot_start_end_the_others(gangs: Make) -> None:
    job = gangs(2)
    requests = {
        job[0]: job[0].starting(FOREVER, gang=job.gang),
        job[1]: job[1].starting(processes=[Process(("/no/such/python",), ("x",), {})], gang=job.gang),
    }
    job.start_requests(requests)
    found = job.verdict()
    assert found.first is not None
    assert (found.exit_code, found.first.node, found.first.cause) == (127, 1, Cause.START)
    assert "/no/such/python" in found.first.detail


# -- the launcher, the agent -------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed", range(2))
def test_killed_launcher_ends_all_ranks(gangs: Make, killed: int) -> None:
    job = gangs(2)
    job.start_requests(
        {
            job[number]: job[number].starting(processes=launched(FOREVER, job, number, number), gang=job.gang)
            for number in range(2)
        }
    )
    pids = [job.pids(number) for number in range(2)]
    kill(pids[killed].launchers[0])
    first = Failure(killed, Cause.LAUNCHER, exit_code=137, signal=signal.SIGKILL)
    assert job.verdict() == Verdict(JobPhase.FAILED, 137, 0, first)
    assert not any(alive(pid) for one in pids for pid in one.ranks)


@pytest.mark.parametrize("killed", [0, 2])
def test_killed_supervisor_ends_all_ranks(gangs: Make, killed: int) -> None:
    """Its guard records the same first cause."""
    job = gangs(3)
    job.start(FOREVER, FOREVER, FOREVER)
    left = [number for number in range(3) if number != killed]
    ranks = [pid for number in range(3) for pid in job.pids(number).ranks]
    kill(job[killed].supervisor_pid())
    found = job.verdict(*left)
    assert found == Verdict(JobPhase.FAILED, 1, left[0], Failure(killed, Cause.AGENT))
    assert job.verdict(killed) == replace(found, decided_by=killed)
    assert not any(map(alive, ranks))


def test_killed_guard_ends_all_ranks(gangs: Make) -> None:
    job = gangs(2)
    job.start(FOREVER, FOREVER)
    job.pids(0)
    kill(job.pids(1).guard)
    found = job.verdict()
    assert found.first is not None
    assert (found.exit_code, found.first.node, found.first.cause) == (1, 1, Cause.AGENT)


@pytest.mark.parametrize("wrappers", [False, True])
@pytest.mark.parametrize("killed", range(2))
def test_ranks_end_where_nothing_of_the_agent_is_left(gangs: Make, killed: int, wrappers: bool) -> None:
    """The kernel ends them. Nobody records that there, and the other nodes agree."""
    job = gangs(3)
    job.start(*[[FOREVER, STUBBORN] if wrappers else [FOREVER] * 2] * 3)
    pids = [job.pids(number) for number in range(3)]
    kill(*(pids[killed].of_cloudddp if wrappers else [pids[killed].guard, pids[killed].supervisor]))
    left = [number for number in range(3) if number != killed]
    assert job.verdict(*left) == Verdict(JobPhase.FAILED, 1, left[0], Failure(killed, Cause.AGENT))
    job.gone()
    assert not any(alive(pid) for one in pids for pid in one.ranks)
    assert job[killed].state().phase is JobPhase.LOST


def test_agent_that_the_machine_asks_to_end_ends_all_ranks(gangs: Make) -> None:
    """As a shutdown does, which sends SIGTERM to every process."""
    job = gangs(2)
    job.start(FOREVER, FOREVER)
    job.pids(0)
    os.kill(job.pids(1).guard, signal.SIGTERM)
    found = job.verdict()
    assert found.first is not None
    assert (found.first.node, found.first.cause) == (1, Cause.AGENT)
    assert "SIGTERM" in found.first.detail


def test_launchers_that_wait_for_each_other_after_all_ranks_have_finished_are_ended(gangs: Make) -> None:
    """As torchrun does at its exit barrier."""
    job = gangs(2)
    launcher = ("sh", "-c", '"$@"; exec sleep 1000', "sh")
    job.start_requests(
        {
            node: node.starting(
                processes=[Process(launcher, ("true",), {"RANK": str(node.number)})], gang=job.gang
            )
            for node in job.nodes
        }
    )
    assert job.verdict() == Verdict(JobPhase.SUCCEEDED, 0, 0)


# -- a cancel, a node that is frozen -----------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(2))
def test_cancel_on_one_node_cancels_the_job_on_all(gangs: Make, at: int) -> None:
    job = gangs(2)
    job.start([FOREVER] * 2, FOREVER)
    for number in range(2):
        job.pids(number)
    assert job[at].cancel().left == 0
    assert job.verdict() == Verdict(JobPhase.CANCELLED, 130, 0)


def test_cancel_of_every_node_at_once(gangs: Make) -> None:
    job = gangs(3)
    job.start(FOREVER, FOREVER, FOREVER)
    threads = [threading.Thread(target=node.cancel) for node in job.nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert job.verdict() == Verdict(JobPhase.CANCELLED, 130, 0)


@pytest.mark.parametrize("frozen", [0, 2])
def test_frozen_node_is_lost_and_ends_with_the_same_verdict_when_thawed(gangs: Make, frozen: int) -> None:
    job = gangs(3, silence=2.0)
    job.start(FOREVER, FOREVER, FOREVER)
    pids = [job.pids(number) for number in range(3)]
    there = [*pids[frozen].of_cloudddp, *pids[frozen].ranks]
    freeze(*there)
    left = [number for number in range(3) if number != frozen]
    found = job.verdict(*left)
    assert found == Verdict(JobPhase.FAILED, 1, left[0], Failure(frozen, Cause.SILENT, peer=left[0]))
    assert all(map(alive, there))
    thaw(*there)
    assert job.verdict() == found
    assert not any(map(alive, there))


def test_node_that_is_frozen_for_a_moment_goes_on(gangs: Make) -> None:
    job = gangs(2, silence=30.0)
    job.start(WAITING, WAITING)
    pids = job.pids(1)
    freeze(*pids.of_cloudddp)
    time.sleep(1)
    thaw(*pids.of_cloudddp)
    for node in job.nodes:
        (node.project / "go").touch()
    assert job.verdict().phase is JobPhase.SUCCEEDED


# -- joining -----------------------------------------------------------------------------------------------------


def assert_no_rank_has_started(job: Gangs, *nodes: int) -> None:
    for number in nodes:
        assert list((job[number].folder() / "ranks").iterdir()) == []
    job.gone()


def test_no_rank_starts_without_a_node_that_never_joins(gangs: Make) -> None:
    job = gangs(3, join=2.0)
    replies = job.start(FOREVER, FOREVER, FOREVER, only=(0, 1))
    for number in (0, 1):
        missing = replies[number].unreachable
        assert missing is not None
        assert (missing.to, missing.by) == ({2: "Connection refused"}, (2,))
    assert_no_rank_has_started(job, 0, 1)
    for state in job.states(0, 1):
        assert state.verdict is not None
        assert state.verdict.first is not None
        assert (state.phase, state.verdict.first.cause, state.verdict.first.peer) == (
            JobPhase.FAILED, Cause.UNREACHABLE, 2,
        )  # fmt: skip


def test_node_without_the_secret_is_refused(gangs: Make) -> None:
    job = gangs(2, join=2.0)
    other = replace(job.gang, secret="0" * 64)
    replies = job.start_requests(
        {
            job[0]: job[0].starting(FOREVER, gang=job.gang),
            job[1]: job[1].starting(FOREVER, first_rank=1, gang=other),
        }
    )
    for number in range(2):
        missing = replies[number].unreachable
        assert missing is not None
        assert (list(missing.to), missing.by) == ([1 - number], (1 - number,))
    assert_no_rank_has_started(job, 0, 1)


def test_port_that_is_taken_is_named_and_no_rank_starts(gangs: Make) -> None:
    job = gangs(2, join=2.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", job.gang.peers[1].port))
        taken.listen()
        replies = job.start(FOREVER, FOREVER)
    found = replies[1].unreachable
    assert found is not None
    assert "Address already in use" in found.error
    assert replies[0].unreachable is not None
    assert_no_rank_has_started(job, 0, 1)


def test_cancel_while_the_nodes_join_starts_no_rank(gangs: Make) -> None:
    job = gangs(2, join=60.0)
    process = job[0].begin(job[0].starting(FOREVER, gang=job.gang))
    try:
        job[0].supervisor_pid()
        assert job[0].cancel().phase is JobPhase.CANCELLED
        assert process.wait(HANG_GUARD) == 0
    finally:
        process.communicate()
    assert_no_rank_has_started(job, 0)


# -- strangers ---------------------------------------------------------------------------------------------------


def hello(sender: int, to: int, nonce: str = "0" * 32) -> bytes:
    return json.dumps({"from": sender, "to": to, "nonce": nonce}).encode() + b"\n"


STRANGERS = {
    "garbage": os.urandom(4096),
    "garbage with line breaks": os.urandom(64) + b"\n\n\n" + os.urandom(64) + b"\n",
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "10 MB": b"x" * (10 << 20),
    "10 MB of lines": b"{}\n" * ((10 << 20) // 3),
    "nested JSON": b"[" * 1000 + b"\n",
    "nested JSON in an object": b'{"a":' * 200 + b"\n",
    "no object": b"7\n",
    "a hello without proof": hello(0, 1),
    "a hello with a wrong proof": hello(0, 1) + json.dumps({"proof": "0" * 64}).encode() + b"\n",
    "a hello with a proof of another type": hello(0, 1) + b'{"proof": {"a": []}}\n',
    "a proof that is no text": hello(0, 1) + b'{"proof": "\\ud800"}\n',
    "a hello of an unknown node": hello(7, 1),
    "a hello of the node itself": hello(1, 1),
    "a hello of no node": b'{"from": null, "to": 1, "nonce": "x"}\n',
    "a nonce with a colon": hello(0, 1, ":") + b'{"proof": ""}\n',
    "a message without a hello": b'%s {"kind": "stop"}\n' % (b"0" * 64),
}


def visit(peer: Peer, data: bytes, *, stay: bool) -> socket.socket:
    """Connect to an agent's port and send it data. With `stay` the connection is left open."""
    connection = socket.create_connection((peer.address, peer.port), timeout=HANG_GUARD)
    with contextlib.suppress(ConnectionError):
        connection.sendall(data)
    if not stay:
        connection.close()
    return connection


@pytest.mark.parametrize("stay", [False, True], ids=["closes", "stays"])
def test_stranger_does_no_harm(gangs: Make, stay: bool) -> None:
    job = gangs(2, silence=5.0)
    job.start(WAITING, WAITING)
    pids = [job.pids(number) for number in range(2)]
    with contextlib.ExitStack() as open_ones:
        for name, data in STRANGERS.items():
            for peer in job.gang.peers:
                open_ones.enter_context(visit(peer, data, stay=stay))
            assert all(alive(one.supervisor) for one in pids), name
        time.sleep(0.5)
        for number, node in enumerate(job.nodes):
            assert node.state().phase is JobPhase.RUNNING
            assert alive(pids[number].supervisor)
            (node.project / "go").touch()
        assert job.verdict() == Verdict(JobPhase.SUCCEEDED, 0, 0)


def test_strangers_that_are_there_first_do_not_keep_the_nodes_apart(gangs: Make) -> None:
    """They occupy every place that an agent has for connections that have not proved anything yet."""
    job = gangs(2, join=40.0)
    process = job[0].begin(job[0].starting("pass", gang=job.gang))
    job[0].supervisor_pid()
    with contextlib.ExitStack() as open_ones:
        for _ in range(100):
            open_ones.enter_context(visit(job.gang.peers[0], b"", stay=True))
        reply = job[1].call(job[1].starting("pass", first_rank=1, gang=job.gang))
        assert reply.unreachable is None
        process.communicate(timeout=HANG_GUARD)
        assert job.verdict().phase is JobPhase.SUCCEEDED


class Recorder:
    """Forwards one connection to an agent and records what the other side sent."""

    def __init__(self, to: Peer) -> None:
        self.port = free_port()
        self.recorded = bytearray()
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._to.address, self._to.port))
            except ConnectionRefusedError:
                client.close()
                continue
            except OSError:
                return
            for one, other, record in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._forward, args=(one, other, record), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket, record: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if record:
                    self.recorded += data
                other.sendall(data)
        for side in (one, other):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


def test_replayed_connection_does_no_harm(gangs: Make) -> None:
    """Everything that node 0 has sent to node 1 is sent again, by a stranger: node 1 has another nonce now."""
    job = gangs(2)
    recorder = Recorder(job.gang.peers[1])
    seen_by_0 = replace(job.gang, peers=(job.gang.peers[0], Peer(1, "127.0.0.1", recorder.port)))
    try:
        job.start_requests(
            {
                job[0]: job[0].starting(WAITING, gang=seen_by_0),
                job[1]: job[1].starting(WAITING, first_rank=1, gang=job.gang),
            }
        )
        pids = [job.pids(number) for number in range(2)]
        until(lambda: recorder.recorded.count(b"heartbeat") > 1)
        lines = bytes(recorder.recorded)
        assert b'"proof"' in lines
        with visit(job.gang.peers[1], lines, stay=True) as connection:
            with contextlib.suppress(ConnectionError):
                while connection.recv(1 << 16):  # until the agent closes it
                    pass
            assert all(alive(one.supervisor) for one in pids)
        for node in job.nodes:
            (node.project / "go").touch()
        assert job.verdict() == Verdict(JobPhase.SUCCEEDED, 0, 0)
    finally:
        recorder.close()


# -- the secret --------------------------------------------------------------------------------------------------


def secrets_on_disk(job: Gangs) -> list[Path]:
    secret = job.gang.secret.encode()
    files = [path for node in job.nodes for path in node.home.rglob("*") if path.is_file()]
    return [path for path in files if secret in path.read_bytes()]


def test_secret_of_the_gang_is_in_no_file_and_no_command_line_nor_the_environment_of_a_rank(
    gangs: Make,
) -> None:
    job = gangs(2)
    job.start(FOREVER, FOREVER)
    ranks = [pid for number in range(2) for pid in job.pids(number).ranks]
    assert secrets_on_disk(job) == []
    secret, lines = job.gang.secret.encode(), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            lines.append((entry / "cmdline").read_bytes())
    assert any(b"start" in line for line in lines)
    assert not any(secret in line for line in lines)
    assert not any(secret in Path(f"/proc/{pid}/environ").read_bytes() for pid in ranks)
    job[0].cancel()
    job.verdict()
    assert secrets_on_disk(job) == []


def test_gang_that_names_a_node_twice_is_refused() -> None:
    peer = gang_of().peers[0]
    with pytest.raises(ProtocolError, match="twice"):
        Gang((peer, peer), "0" * 64)

"""What others can do to the agents of a job on the same network: strangers on their ports, and the secret
they lack."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.agentnode import FOREVER, HANG_GUARD, WAITING, alive, environ, free_port, until
from support.exposed import command_lines, files_with
from support.gangs import Make

from agent.gang.mesh import PURPOSE, Mesh
from agent.node.link import HELLO as HELLO_SECONDS
from agent.node.link import MAX_STRANGERS, Link, Server
from cloudddp.agent.protocol.gang import Gang, Kind, Observed, PeerMessage, Report
from cloudddp.agent.protocol.jobs import Cause, Failure, Verdict
from cloudddp.agent.protocol.phases import JobPhase, Peer

HELLO = json.dumps({"nonce": "0" * 32}).encode() + b"\n"
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
    "a hello without proof": HELLO,
    "a hello with a wrong proof": HELLO + json.dumps({"seal": "0" * 64}).encode() + b"\n",
    "a hello with a proof of another type": HELLO + b'{"seal": {"a": []}}\n',
    "a proof that is no text": HELLO + b'{"seal": "\\ud800"}\n',
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


def test_connections_of_strangers_do_not_disturb_the_job(gangs: Make) -> None:
    """Neither those that close their connections, nor those that stay."""
    job = gangs(2, silence=5.0)
    job.start(WAITING, WAITING)
    pids = [job.pids(number) for number in range(2)]
    with contextlib.ExitStack() as open_ones:
        for name, data in STRANGERS.items():
            for peer, stay in itertools.product(job.gang.peers, (False, True)):
                open_ones.enter_context(visit(peer, data, stay=stay))
            assert all(alive(one.supervisor) for one in pids), name
        time.sleep(0.5)
        # A connection that proves the secret, and is of no node or for no node of the job.
        for text in ("[7, 1]", "[1, 1]", "[0, 7]", "[[], 1]", "[0]", "null", "0"):
            link = Link.within(HANG_GUARD, job.gang.peers[1], job.gang.secret, PURPOSE, again=())
            with contextlib.closing(link):
                link.write("nodes", text)
                assert link.read_all(1) == b"", text
        for number, node in enumerate(job.nodes):
            assert node.state().phase is JobPhase.RUNNING
            assert alive(pids[number].supervisor)
            (node.project / "go").touch()
        assert job.verdict() == Verdict(JobPhase.SUCCEEDED, 0, 0)


def test_strangers_that_come_again_do_not_keep_a_node_out() -> None:
    """The oldest of them makes room."""
    served, over = threading.Event(), threading.Event()
    server = Server("secret", "test", 2, lambda _: served.set())
    peer = Peer(0, "127.0.0.1", server.listen("127.0.0.1", 0), "i-0")
    opened: list[int] = []

    def stranger() -> None:
        while not over.wait(0.2):
            with contextlib.suppress(OSError), visit(peer, b"", stay=True) as connection:
                opened.append(connection.fileno())
                connection.recv(1)

    for _ in range(MAX_STRANGERS + 10):
        threading.Thread(target=stranger, daemon=True).start()
    until(lambda: len(opened) > MAX_STRANGERS + 2)
    Link.within(5.0, peer, "secret", "test").close()
    assert served.wait(HANG_GUARD)
    over.set()
    server.close()


class Recorder:
    """Accepts a first connection and never answers; forwards the later ones to an agent, and records what the
    other side sent."""

    def __init__(self, to: Peer) -> None:
        self.port = free_port()
        self.recorded = bytearray()
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        self._held, _ = self._listener.accept()
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._to.address, self._to.port))
            except ConnectionRefusedError:
                client.close()
                continue
            except OSError:
                return
            for one, other, record in ((client, server, self.recorded), (server, client, bytearray())):
                threading.Thread(target=self._forward, args=(one, other, record), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                record += data
                other.sendall(data)
        for side in (one, other):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


def test_node_that_accepts_and_never_answers_is_named(gangs: Make) -> None:
    job = gangs(2, join=7.0)
    with socket.create_server(("127.0.0.1", job.gang.peers[1].port)):
        reply = job[0].call(job[0].starting("pass", gang=job.gang))
    assert reply.unreachable is not None
    assert reply.unreachable.to == {1: "it accepts connections, and does not answer"}


def test_node_of_another_job_is_named(gangs: Make) -> None:
    job = gangs(2, join=3.0)
    other = replace(job.gang, secret="x" * 64)
    begun = {
        job[k]: job[k].starting("pass", first_rank=k, gang=gang) for k, gang in enumerate((job.gang, other))
    }
    for number, reply in job.start_requests(begun).items():
        assert reply.unreachable is not None
        assert reply.unreachable.to == {1 - number: "it proves another secret: it belongs to another job"}


def test_connection_that_is_never_answered_is_opened_again_and_a_replayed_one_does_no_harm(
    gangs: Make,
) -> None:
    """Everything that node 0 has sent to node 1 is sent again, by a stranger: node 1 has another nonce
    now."""
    job = gangs(2, join=40.0)
    recorder = Recorder(job.gang.peers[1])
    seen_by_0 = replace(job.gang, peers=(job.gang.peers[0], Peer(1, "127.0.0.1", recorder.port)))
    try:
        gangs_seen = enumerate((seen_by_0, job.gang))
        job.start_requests(
            {job[k]: job[k].starting(WAITING, first_rank=k, gang=gang) for k, gang in gangs_seen}
        )
        pids = [job.pids(number) for number in range(2)]
        until(lambda: recorder.recorded.count(b"heartbeat") > 1)
        lines = bytes(recorder.recorded)
        assert b'"seal"' in lines
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


# -- a node of the job that is broken, or was taken over -----------------------------------------------------


class Broken:
    """A node that takes part in the gang, and floods it once it is told to."""

    def __init__(self, gang: Gang, node: int) -> None:
        self._mesh = Mesh(node, gang)
        self.floods = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        heartbeat = 0.0
        while not self._stop.is_set():
            connected = self._mesh.complete
            self._mesh.poll(0.0 if self.floods else 0.02)
            if connected and time.monotonic() > heartbeat:
                heartbeat = time.monotonic() + 0.3
                self._mesh.send(PeerMessage(Kind.READY))
            for _ in range(20 if self.floods else 0):
                self._mesh.send(FLOOD)
            self._mesh.flush(1.0)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._mesh.close()


# Of the next attempt: it has to wait for that. tests/unit/test_gang_step.py has other attempts.
FLOOD = PeerMessage(
    Kind.ENDED, attempt=1, report=Report(False, (Observed(Failure(1, Cause.RANK), 0.0, ("x" * 1000,) * 50),))
)


def memory(pid: int) -> int:
    """Return the resident memory of a process in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) >> 10


def test_memory_of_an_agent_is_bounded(gangs: Make) -> None:
    job = gangs(2, silence=3.0)
    broken = Broken(job.gang, 1)
    try:
        job.start(FOREVER, "", only=(0,), grace=0.5)
        supervisor = job.pids(0).supervisor
        before = memory(supervisor)
        broken.floods = True
        for _ in range(15):
            time.sleep(0.1)
            assert memory(supervisor) < before + 60
        assert job[0].state().phase is JobPhase.RUNNING
    finally:
        broken.close()


def test_secret_of_the_gang_is_in_no_file_and_no_command_line_nor_the_environment_of_a_rank(
    gangs: Make,
) -> None:
    job = gangs(2)
    job.start(FOREVER, FOREVER)
    ranks = [pid for number in range(2) for pid in job.pids(number).ranks]
    homes = [node.home for node in job.nodes]
    assert files_with(job.gang.secret, *homes) == []
    secret, lines = job.gang.secret.encode(), command_lines()
    assert any(b"start" in line for line in lines)
    assert not any(secret in line for line in lines)
    assert not any(secret in environ(pid) for pid in ranks)
    job[0].cancel()
    job.verdict()
    assert files_with(job.gang.secret, *homes) == []


def test_refused_connection_leaves_no_thread() -> None:
    """A stranger may connect again and again: threads would add up."""
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(Link(ours, "secret", PURPOSE)) as link:
        before = threading.active_count()
        theirs.sendall(b"7\n")
        with pytest.raises(TypeError):
            link.accept()
        until(lambda: threading.active_count() <= before, HELLO_SECONDS / 2)

"""The channels of SSH connections, and commands on many nodes at once."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import paramiko
import pytest
from support.cutlink import CutLink
from support.sshserver import Server, Site

from cloudddp.ssh.connection import Connection
from cloudddp.ssh.fleet import Fleet
from cloudddp.ssh.running import CommandSpec, Input
from cloudddp.ssh.target import NodeSocket
from cloudddp.ssh.time_limits import IdleTimer

MIB = 1 << 20
HANG_GUARD = 300.0  # seconds; only a hang is this long


def test_command_is_closed_on_a_connection_that_has_just_broken(connection: Connection) -> None:
    """Its transport has not noticed yet. An error here would take the place of the one that the user
    needs."""
    begun: list[bytes] = []
    activity = IdleTimer(HANG_GUARD, None)
    running = connection.start("echo on; cat", activity)
    until = lambda: bool(begun)  # noqa: E731
    running.exchange(Input(b""), (begun.append, len), activity, until=until, keep_open=True)
    assert begun == [b"on\n"]
    connection._stream.close()
    running.close()


def test_long_streams_need_no_key_exchange(connection: Connection) -> None:
    """paramiko's thread that answers CLOSE also carries out a key exchange, and waits for its own end."""
    assert connection.transport.packetizer.REKEY_BYTES == 64 << 30


@pytest.mark.parametrize("late", [(93, 300_000), (94, b"data"), (96,)], ids=["window", "data", "eof"])
def test_nothing_is_sent_after_close(
    connection: Connection, server: Server, late: tuple[int, int | bytes]
) -> None:
    """A thread may have decided to send before paramiko's own thread has closed the channel."""
    kind, *fields = late
    message = paramiko.Message()
    message.add_byte(bytes([kind]))
    message.add_int(0)  # sshd's number of the first channel
    for field in fields:
        message.add_int(field) if isinstance(field, int) else message.add_string(field)
    assert connection.run(CommandSpec("true")).exit_code == 0
    with (
        connection.transport.clear_to_send_lock
    ):  # as each sender does: paramiko's thread may just send CLOSE
        connection.transport.packetizer.send_message(message)
    for _ in range(2):  # with the number of the first one, which is open again
        assert connection.run(CommandSpec("cat", stdin=b"still here")).stdout == b"still here"
    assert len(server.connections) == 1


def test_commands_that_end_at_once_keep_the_connection_that_they_share(
    connection: Connection, server: Server
) -> None:
    """A command without input gets no end of it: it could arrive after the answer to the server's CLOSE,
    for which OpenSSH closes the connection (https://github.com/paramiko/paramiko/issues/1584)."""
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: connection.run(CommandSpec("cat; exit 3")), range(64)))
    assert ({(one.exit_code, one.stdout) for one in results}, len(server.connections)) == ({(3, b"")}, 1)


def test_concurrent_commands_share_a_connection(connection: Connection, server: Server) -> None:
    together = threading.Barrier(8, timeout=300)

    def one(number: int) -> bytes:
        data = bytes([number]) * 300_000

        def pieces() -> Iterator[bytes]:
            yield data
            together.wait()  # all eight are open at once
            yield b"end"

        return connection.run(CommandSpec("cat", stdin=pieces())).stdout

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(8)))
    assert found == [bytes([number]) * 300_000 + b"end" for number in range(8)]
    assert len(server.connections) == 1


def test_near_server_may_not_send_far_ahead_of_a_slow_reader(connection: Connection, tmp_path: Path) -> None:
    """A window is what may be on its way in one round trip. More than that only fills memory and queues."""
    sent = tmp_path / "sent"
    received = bytearray()

    def read(data: bytes) -> None:
        if not received:
            before = b""
            while not before or sent.read_bytes() != before:  # until the server may send no more
                before = sent.read_bytes()
                time.sleep(0.3)
            assert len(before) < 14, "a window of 16 MiB would let all of it go"
        received.extend(data)

    command = f"for k in `seq 14`; do printf x >> {sent}; head -c {MIB} /dev/zero; done"
    connection.run(CommandSpec(command, on_stdout=read))
    assert len(received) == 14 * MIB


def test_windows_of_many_nodes_are_limited_together(ssh_site: Site, server: Server) -> None:
    for nodes, window in ((1, 16 * MIB), (8, 16 * MIB), (16, 8 * MIB), (1000, 2 * MIB)):
        targets = dict.fromkeys(range(nodes), ssh_site.target(server.port))
        with Fleet(targets) as fleet:
            assert fleet.window == window


NODES = 64


def test_all_nodes_run_a_command_at_the_same_time_and_are_read_while_they_run(ssh_site: Site) -> None:
    """Every node gets its answer once all nodes have asked: no node waits for the end of another one."""
    received = {node: bytearray() for node in range(NODES)}
    all_have_asked = threading.Event()

    def read(node: int, data: bytes) -> None:
        received[node] += data
        if all(received.values()):
            all_have_asked.set()

    def answer() -> Iterator[bytes]:
        while not all_have_asked.is_set():
            yield b""
        yield b"answer\n"

    asks = "echo question; cat"
    specs = {node: CommandSpec(asks, answer(), on_stdout=partial(read, node)) for node in range(NODES)}
    with Fleet(dict.fromkeys(range(NODES), ssh_site.target(ssh_site.server().port))) as fleet:
        fleet.connect()
        results = fleet.each(lambda node: fleet.run(node, specs[node]), nodes=specs).all()
    assert {bytes(one) for one in received.values()} == {b"question\nanswer\n"}
    assert {(one.exit_code, one.stdout) for one in results.values()} == {(0, b"")}


def test_node_that_takes_no_bytes_does_not_hold_up_the_others(ssh_site: Site) -> None:
    """More input than it accepts waits for node 0."""
    link = CutLink(ssh_site.server().port)
    targets = {0: ssh_site.target(link.port), 1: ssh_site.target(ssh_site.server().port)}
    with contextlib.closing(link), Fleet(targets) as fleet:
        fleet.connect()
        begun = threading.Event()

        def endless() -> Iterator[bytes]:
            while True:
                yield bytes(1 << 18)

        def work(node: int) -> int:
            if node == 0:
                spec = CommandSpec("echo; cat > /dev/null", endless(), 3, on_stdout=lambda _: begun.set())
                return fleet.run(0, spec).exit_code
            assert begun.wait(HANG_GUARD)
            link.held.set()
            for _ in range(5):
                assert len(fleet.run(1, CommandSpec("cat", b"x" * 3_000_000)).stdout) == 3_000_000
            return 0

        found = fleet.each(work, fatal=lambda _: False)
    assert found.values == {1: 0}
    assert "no answer for 3 s" in str(found.errors[0])


def test_send_to_a_node_that_takes_no_bytes_ends() -> None:
    """paramiko repeats a send without limit."""
    ours, theirs = socket.socketpair()
    stream = NodeSocket(ours, dead=1.0)
    with theirs, contextlib.closing(stream):
        blocked = 0
        with pytest.raises(ConnectionAbortedError):
            while blocked < 100:
                try:
                    stream.send(bytes(1 << 20))
                except TimeoutError:
                    blocked += 1
        assert blocked > 1


def test_closed_connections_leave_no_thread(ssh_site: Site) -> None:
    before = set(threading.enumerate())
    server = ssh_site.server()
    new = set(threading.enumerate()) - before
    with Fleet(dict.fromkeys(range(4), ssh_site.target(server.port))) as fleet:
        fleet.connect()
    deadline = time.monotonic() + HANG_GUARD
    while [one for one in set(threading.enumerate()) - before - new if not one.name.startswith("asyncio")]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_process_ends_cleanly_with_connections_that_are_busy(ssh_site: Site) -> None:
    server = ssh_site.server()
    code = (
        "fleet = Fleet(dict.fromkeys(range(8), target)); fleet.connect()\n"
        "begun = threading.Semaphore(0)\n"
        "spec = CommandSpec('yes', on_stdout=lambda _: begun.release())\n"
        "work = lambda node: fleet.run(node, spec)\n"
        "threading.Thread(target=fleet.each, args=(work,), daemon=True).start()\n"
        "for _ in range(100): begun.acquire()\n"
    )
    for _ in range(2):
        words = ssh_site.program(server.port, code)
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert (done.returncode, done.stderr) == (0, "")

"""Commands on many nodes at once: all of them run, whatever their number."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from support.sshserver import Site

from cloudddp.ssh.fleet import Fleet, Outcome
from cloudddp.ssh.running import CommandSpec, Result
from cloudddp.ssh.target import NodeSocket

NODES = 64
HANG_GUARD = 60.0


def run_all(fleet: Fleet, specs: dict[int, CommandSpec], **more: Any) -> Outcome[Result]:
    return fleet.each(lambda node: fleet.run(node, specs[node]), nodes=specs, **more)


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

    specs = {
        node: CommandSpec("echo question; cat", answer(), on_stdout=partial(read, node))
        for node in range(NODES)
    }
    with Fleet(dict.fromkeys(range(NODES), ssh_site.target(ssh_site.server().port))) as fleet:
        fleet.connect()
        results = run_all(fleet, specs).all()
    assert {bytes(one) for one in received.values()} == {b"question\nanswer\n"}
    assert {(one.exit_code, one.stdout) for one in results.values()} == {(0, b"")}


def silent_after_login(ssh_site: Site) -> tuple[socket.socket, int, Callable[[], None]]:
    """Return a listener in front of a server, its port, and what ends its carrying of bytes to and fro."""
    server = ssh_site.server()
    listener = socket.create_server(("127.0.0.1", 0))
    stopped = threading.Event()

    def carry(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            if stopped.is_set():
                threading.Event().wait(HANG_GUARD)  # nothing is read any more
            sink.sendall(data)

    def accept() -> None:
        inner, _ = listener.accept()
        outer = socket.create_connection(("127.0.0.1", server.port))
        for pair in ((inner, outer), (outer, inner)):
            threading.Thread(target=carry, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener, listener.getsockname()[1], stopped.set


def test_node_that_takes_no_bytes_does_not_hold_up_the_others(ssh_site: Site) -> None:
    """More input than it accepts waits for node 0."""
    listener, port, stop = silent_after_login(ssh_site)
    targets = {0: ssh_site.target(port), 1: ssh_site.target(ssh_site.server().port)}
    with listener, Fleet(targets) as fleet:
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
            stop()
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
        "import sys, threading; from pathlib import Path\n"
        "from cloudddp.ssh.fleet import Fleet\n"
        "from cloudddp.ssh.running import CommandSpec\n"
        "from cloudddp.ssh.target import Target\n"
        "key, port, host = sys.argv[1:4]\n"
        "target = Target('n', '127.0.0.1', int(port), 'ubuntu', Path(key), (host,))\n"
        "fleet = Fleet(dict.fromkeys(range(8), target)); fleet.connect()\n"
        "begun = threading.Semaphore(0)\n"
        "spec = CommandSpec('yes', on_stdout=lambda _: begun.release())\n"
        "work = lambda node: fleet.run(node, spec)\n"
        "threading.Thread(target=fleet.each, args=(work,), daemon=True).start()\n"
        "for _ in range(100): begun.acquire()\n"
    )
    arguments = [str(ssh_site.private_key), str(server.port), ssh_site.host.public]
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")

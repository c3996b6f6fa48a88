"""Commands on many nodes at once: all of them run, whatever their number, in a bounded number of threads."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.sshserver import Site, site

from cloudddp.errors import NodeError
from cloudddp.ssh.connection import Connection
from cloudddp.ssh.fleet import Fleet, Outcome, gather
from cloudddp.ssh.running import CommandSpec, Result

NODES = 64
MOST_THREADS = 32
HANG_GUARD = 60.0


@pytest.fixture
def ssh_site(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as created:
        yield created


@pytest.fixture
def fleet(ssh_site: Site) -> Iterator[Fleet]:
    target = ssh_site.target(ssh_site.server().port)
    with Fleet(dict.fromkeys(range(NODES), target)) as created:
        yield created


def run_all(fleet: Fleet, specs: dict[int, CommandSpec], **more: Any) -> Outcome[Result]:
    return gather({node: partial(fleet.start, node, spec) for node, spec in specs.items()}, **more)


class Threads:
    """The most threads that this process has had at a time, besides those before."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())
        self.most = 0
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            found = set(threading.enumerate()) - self._before - {self._watcher}
            # Those of the server and of asyncio, which run in this process, too.
            self.most = max(self.most, sum(not one.name.startswith(("asyncio", "waitpid")) for one in found))

    def __enter__(self) -> Threads:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()


def test_all_nodes_run_a_command_at_the_same_time_in_few_threads(fleet: Fleet, tmp_path: Path) -> None:
    """Each command ends only once all of them have begun."""
    (tmp_path / "begun").mkdir()
    wait = f"touch {tmp_path}/begun/$0; while [ $(ls {tmp_path}/begun | wc -l) -lt {NODES} ]; do sleep 0.2; done; echo $0"
    with Threads() as threads:
        fleet.connect()
        found = run_all(fleet, {node: CommandSpec(f"sh -c '{wait}' {node}") for node in range(NODES)}).all()
    assert {node: int(result.stdout) for node, result in found.items()} == {n: n for n in range(NODES)}
    assert threads.most < MOST_THREADS


def test_output_of_all_nodes_is_passed_on_while_they_run(fleet: Fleet) -> None:
    """Every node answers to what was read from it: no node waits for the end of another one."""
    received = {node: bytearray() for node in range(NODES)}
    answered = {node: threading.Event() for node in range(NODES)}

    def read(node: int, data: bytes) -> None:
        received[node] += data
        answered[node].set()

    def answer(node: int) -> Iterator[bytes]:
        while not answered[node].is_set():
            yield b""
        yield b"answer\n"

    fleet.connect()
    specs = {
        node: CommandSpec("echo question; cat", answer(node), on_stdout=partial(read, node))
        for node in range(NODES)
    }
    results = run_all(fleet, specs).all()
    assert {bytes(one) for one in received.values()} == {b"question\nanswer\n"}
    assert {(one.exit_code, one.stdout) for one in results.values()} == {(0, b"")}


def test_each_node_has_its_own_outcome(ssh_site: Site) -> None:
    lost = ssh_site.server()
    targets = {0: ssh_site.target(ssh_site.server().port), 1: ssh_site.target(lost.port)}
    with Fleet(targets) as fleet:
        fleet.connect()
        begun = threading.Event()
        specs = {
            0: CommandSpec("exit 3"),
            1: CommandSpec("echo; sleep 100", command_timeout=None, on_stdout=lambda _: begun.set()),
            2: CommandSpec("true"),
        }
        ends: dict[int, Result | Exception] = {}
        done = threading.Semaphore(0)

        def ended(node: int, end: Result | Exception) -> None:
            ends[node] = end
            done.release()

        fleet.targets[2] = targets[0]  # which is not connected
        for node, spec in specs.items():
            fleet.start(node, spec, partial(ended, node))
        assert begun.wait(HANG_GUARD)
        lost.drop()
        for _ in specs:
            assert done.acquire(timeout=HANG_GUARD)
    assert isinstance(ends[0], Result)
    assert ends[0].exit_code == 3
    assert "the SSH connection broke" in str(ends[1])
    assert "not connected" in str(ends[2])


@pytest.mark.parametrize("broken", ["input", "output"])
def test_error_of_one_nodes_stream_ends_that_command_alone(fleet: Fleet, broken: str) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"some"
        if broken == "input":
            raise ValueError("no more input")

    def refuse(_data: bytes) -> None:
        raise ValueError("no more output")

    fleet.connect()
    specs = {
        0: CommandSpec("cat", pieces(), on_stdout=refuse if broken == "output" else None),
        1: CommandSpec("echo good"),
    }
    found = run_all(fleet, specs, fatal=lambda _: False)
    assert str(found.errors[0]) == f"no more {broken}"
    assert found.values[1].stdout == b"good\n"


def test_silent_command_times_out_and_the_others_go_on(fleet: Fleet) -> None:
    fleet.connect()
    specs = {0: CommandSpec("sleep 100", command_timeout=0.5), 1: CommandSpec("sleep 1; echo good")}
    found = run_all(fleet, specs, fatal=lambda _: False)
    assert "no answer for 0.5 s to: sleep 100" in str(found.errors[0])
    assert found.values[1].stdout == b"good\n"


def test_fatal_error_does_not_wait_for_the_others(fleet: Fleet) -> None:
    fleet.connect()
    specs = {
        0: CommandSpec("sleep 100", command_timeout=None),
        1: CommandSpec("sleep 100", command_timeout=0.5),
    }
    found = run_all(fleet, specs, on_stop=fleet.close)
    assert sorted(found.errors) == [1]
    with pytest.raises(NodeError):
        fleet.run(0, "true")


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
    """More input than the kernel buffers waits for node 0, and the commands of node 1 go on."""
    listener, port, stop = silent_after_login(ssh_site)
    targets = {0: ssh_site.target(port), 1: ssh_site.target(ssh_site.server().port)}
    with listener, Fleet(targets) as fleet:
        fleet.connect()
        begun = threading.Event()
        ended = threading.Event()

        def endless() -> Iterator[bytes]:
            while True:
                yield bytes(1 << 18)

        spec = CommandSpec("echo; cat > /dev/null", endless(), None, on_stdout=lambda _: begun.set())
        fleet.start(0, spec, lambda _: ended.set())
        assert begun.wait(HANG_GUARD)
        stop()
        time.sleep(0.5)
        for _ in range(5):
            result = run_all(fleet, {1: CommandSpec("cat", b"x" * 3_000_000)}).all()[1]
            assert len(result.stdout) == 3_000_000
        assert not ended.is_set()
        transport = fleet[0]._client.get_transport()
        assert transport is not None
        assert transport.sock.backlog < 8 << 20  # what is kept for a node is bounded


def test_connections_that_are_closed_leave_nothing_in_the_loop(ssh_site: Site) -> None:
    server = ssh_site.server()
    connections = [Connection.open(ssh_site.target(server.port)) for _ in range(4)]
    transports = [one._client.get_transport() for one in connections]
    loop = transports[0].sock.loop  # type: ignore[union-attr]
    assert len(loop._readers) >= 4
    for one in connections:
        one.close()
    for transport in transports:
        transport.join(HANG_GUARD)  # type: ignore[union-attr]
        assert not transport.is_alive()  # type: ignore[union-attr]
    deadline = time.monotonic() + HANG_GUARD
    while any(transport.sock in loop._readers for transport in transports):  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_process_ends_cleanly_with_connections_that_are_busy(ssh_site: Site) -> None:
    """A thread that Python ends in the middle of a greenlet crashes the process."""
    server = ssh_site.server()
    code = (
        "import sys; from pathlib import Path\n"
        "from cloudddp.ssh.connection import Target\n"
        "from cloudddp.ssh.fleet import Fleet\n"
        "from cloudddp.ssh.running import CommandSpec\n"
        "key, port, host = sys.argv[1:4]\n"
        "target = Target('n', '127.0.0.1', int(port), 'ubuntu', Path(key), (host,))\n"
        "fleet = Fleet(dict.fromkeys(range(8), target)); fleet.connect()\n"
        "for node in range(8): fleet.start(node, CommandSpec('yes', on_stdout=len), lambda _end: None)\n"
        "if len(sys.argv) > 4: fleet.close()\n"
    )
    arguments = [str(ssh_site.private_key), str(server.port), ssh_site.host.public]
    for number in range(20):
        last = ["close"] * (number % 2)
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments, *last],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_key_exchange_that_never_ends_does_not_hold_up_other_connections(ssh_site: Site) -> None:
    """A keepalive is due on the connection of a node that has begun an exchange and is silent since."""
    connection = Connection.open(ssh_site.target(ssh_site.server().port))
    transport = connection._client.get_transport()
    assert transport is not None
    served = threading.Event()
    transport.clear_to_send.clear()
    loop = transport.sock.loop
    loop.call_soon(lambda: transport.global_request("keepalive@lag.net", wait=False))
    loop.call_soon(served.set)
    assert served.wait(10)  # paramiko gives up after 30 s
    transport.clear_to_send.set()
    connection.close()

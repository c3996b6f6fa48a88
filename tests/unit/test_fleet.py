"""Many nodes at once: every result is kept, a fatal error returns at once, and no host delays the others."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.harness import ROOT
from support.sshserver import Site

from cloudddp.config import timing
from cloudddp.errors import ConnectError, NodeError
from cloudddp.ssh import fleet as fleets
from cloudddp.ssh.fleet import Fleet, Outcome
from cloudddp.ssh.running import CommandSpec
from cloudddp.ssh.target import generate_key

HANG_GUARD = 300.0  # seconds; only a hang is this long


class Stuck:
    """A host that answers only once `release` is set."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.release = threading.Event()
        self.ended = threading.Event()

    def __call__(self) -> str:
        self.began.set()
        self.release.wait(HANG_GUARD)
        self.ended.set()
        return "late"


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    host = Stuck()
    yield host
    host.release.set()
    if host.began.is_set():
        assert host.ended.wait(HANG_GUARD)


def failing(after: threading.Event | None = None) -> Callable[[], str]:
    def work() -> str:
        if after is not None:
            assert after.wait(HANG_GUARD)
        raise NodeError("broken")

    return work


def test_every_node_has_a_result() -> None:
    outcome = fleets.each({node: (lambda node=node: node * node) for node in range(100)})  # type: ignore[misc]
    assert outcome.all() == {node: node * node for node in range(100)}
    assert fleets.each({}).all() == {}
    with pytest.raises(NodeError, match=r"^two \(and 2 more nodes\)$"):
        Outcome({0: 0}, {node: NodeError(text) for node, text in ((3, "three"), (2, "two"), (4, "4"))}).all()


def test_fatal_error_keeps_earlier_results_and_does_not_wait_for_a_stuck_host(stuck: Stuck) -> None:
    done, stopped = threading.Event(), threading.Event()

    def look() -> None:
        if stuck.began.is_set():
            done.set()  # the others have ended before, since the waiting thread had nothing to do

    work = {0: lambda: "zero", 2: lambda: "two", 1: failing(done), 3: stuck}
    outcome = fleets.each(work, meanwhile=look, on_stop=stopped.set)
    assert (stuck.ended.is_set(), stopped.is_set()) == (False, True)
    assert (outcome.values, list(outcome.errors)) == ({0: "zero", 2: "two"}, [1])
    with pytest.raises(NodeError, match="broken"):
        outcome.all()


def test_node_that_is_given_up_is_not_awaited_and_its_first_result_counts(stuck: Stuck) -> None:
    """It may be given up at the moment in which it ends."""
    given_up, work = NodeError("given up"), {0: lambda: "zero", 1: stuck}
    outcome = fleets.each(work, fatal=lambda _: False, meanwhile=lambda: {1: given_up})
    assert not stuck.ended.is_set()
    assert (outcome.values, outcome.errors) == ({0: "zero"}, {1: given_up})

    def release() -> dict[int, NodeError]:
        stuck.release.set()
        return {0: NodeError("late")}

    outcome = fleets.each(work, fatal=lambda _: False, meanwhile=release)
    assert (outcome.values, outcome.errors) == ({0: "zero", 1: "late"}, {})


def test_caller_decides_which_error_is_fatal(stuck: Stuck) -> None:
    def mild() -> str:
        raise ConnectError("mild")

    work = {0: mild, 1: failing(stuck.began), 2: stuck}
    outcome = fleets.each(work, fatal=lambda error: not isinstance(error, ConnectError))
    assert not stuck.ended.is_set()
    assert {node: str(error) for node, error in outcome.errors.items()} == {0: "mild", 1: "broken"}


def test_ctrl_c_does_not_wait_for_a_stuck_host(stuck: Stuck) -> None:
    stopped = threading.Event()

    def interrupt() -> None:
        assert stuck.began.wait(HANG_GUARD)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            fleets.each({0: stuck, 1: interrupt}, on_stop=stopped.set)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped.is_set()
    assert not stuck.ended.is_set()


def test_connect_names_the_node_that_fails(ssh_site: Site) -> None:
    good = ssh_site.target(ssh_site.server().port)
    bad = ssh_site.target(ssh_site.server().port, host_keys=(generate_key().public,), label="node 1 (i-bad)")
    with Fleet({0: good, 1: bad}) as fleet, pytest.raises(ConnectError, match="i-bad"):
        fleet.connect(within=HANG_GUARD)


def test_connect_waits_for_a_booting_node(ssh_site: Site) -> None:
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))  # bound but not listening: refused until a server takes the socket over
        early = ssh_site.server()
        targets = {0: ssh_site.target(early.port), 1: ssh_site.target(late.getsockname()[1])}
        with Fleet(targets) as fleet:
            with pytest.raises(ConnectError, match="connection refused"):
                fleet.connect()
            again = Fleet(targets)
            connecting = threading.Thread(target=again.connect, kwargs={"within": HANG_GUARD}, daemon=True)
            connecting.start()
            while len(early.connections) < 2:
                assert connecting.is_alive()
                threading.Event().wait(0.02)
            ssh_site.server(sock=late.dup())
            connecting.join(HANG_GUARD)
            assert again.run(1, CommandSpec("echo up")).stdout == b"up\n"
            again.close()


def test_late_refusal_on_a_slow_boot_is_retried(ssh_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ubuntu orders ssh.service only after network.target and nss-user-lookup.target, so sshd may answer
    while /run/nologin exists, and before cloud-init has written the key. That may be minutes after the first
    attempt."""
    monkeypatch.setenv(timing.VARIABLE, "0.02")
    patience = timing.current().key
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))  # bound but not listening: refused until a server takes the socket over
        fleet = Fleet({0: ssh_site.target(late.getsockname()[1])})
        failed: list[BaseException] = []

        def connect() -> None:
            try:
                fleet.connect(within=HANG_GUARD, connect_timeout=HANG_GUARD)
            except ConnectError as error:
                failed.append(error)

        connecting = threading.Thread(target=connect, daemon=True)
        connecting.start()
        connecting.join(2 * patience)
        assert connecting.is_alive()
        server = ssh_site.server(sock=late.dup(), refuse=1, nologin=1)
        connecting.join(HANG_GUARD)
        assert not failed
        assert fleet.run(0, CommandSpec("echo up")).stdout == b"up\n"
        assert len(server.connections) == 3
        fleet.close()


def test_key_that_is_always_refused_ends_the_wait(ssh_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(timing.VARIABLE, "0.02")
    fleet = Fleet({0: ssh_site.target(ssh_site.server(refuse=10**6).port)})
    with pytest.raises(ConnectError, match="the cluster's key is refused for user 'ubuntu'; gave up after"):
        fleet.connect(within=600, connect_timeout=HANG_GUARD)


def test_silence_is_measured_per_node(ssh_site: Site) -> None:
    """A full backlog drops packets, as a security group without a rule does."""
    with socket.socket() as full, contextlib.ExitStack() as held:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            client = held.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        fleet = Fleet({0: ssh_site.target(ssh_site.server().port), 1: ssh_site.target(full.getsockname()[1])})
        assert fleet.silent_for() is None
        seen: list[int] = []

        def stop() -> None:
            if found := fleet.silent_for():
                seen.append(found[0])
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fleet.connect(within=HANG_GUARD, connect_timeout=0.3, meanwhile=stop)
    assert seen == [1]


def test_connect_timeout_reports_its_duration(ssh_site: Site) -> None:
    with socket.socket() as never:
        never.bind(("127.0.0.1", 0))
        fleet = Fleet({0: ssh_site.target(never.getsockname()[1])})
        with pytest.raises(ConnectError, match=r"connection refused.*gave up after [1-9]\d* s$"):
            fleet.connect(within=1.5)


def test_attempt_during_which_the_process_was_stopped_is_repeated(ssh_site: Site) -> None:
    """A laptop that slept must not take its own silence for that of the node. The node is silent for the
    first attempt, during which the process is stopped for longer than an attempt takes, and closes the
    second."""
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        node.settimeout(HANG_GUARD)
        connects = "Fleet({0: target}).connect(connect_timeout=4.0)"
        code = f"try: {connects}\nexcept ConnectError as error: print(error.message)"
        words = ssh_site.program(node.getsockname()[1], code)
        process = stack.enter_context(subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        stack.callback(process.kill)
        first, _ = node.accept()
        process.send_signal(signal.SIGSTOP)
        time.sleep(5)
        process.send_signal(signal.SIGCONT)
        second, _ = node.accept()
        first.close()
        second.close()
        out, _ = process.communicate(timeout=HANG_GUARD)
        assert "closed the connection before its SSH banner" in out
        node.settimeout(0)
        with pytest.raises(BlockingIOError):
            node.accept()


def test_fatal_error_closes_connections_and_ends_stuck_commands(ssh_site: Site) -> None:
    targets = {node: ssh_site.target(ssh_site.server().port) for node in range(2)}
    ended, began = threading.Event(), threading.Event()

    def work(node: int) -> None:
        if node == 1:
            assert began.wait(HANG_GUARD)
            raise NodeError("broken")
        try:
            fleet.run(0, CommandSpec("echo began; sleep 1000", on_stdout=lambda _: began.set()))
        finally:
            ended.set()

    with Fleet(targets) as fleet:
        fleet.connect()
        with pytest.raises(NodeError, match="broken"):
            fleet.each(work).all()
        assert ended.wait(HANG_GUARD)
        with pytest.raises(NodeError, match=r"node 0 \(i-0\): not connected"):
            fleet.run(0, CommandSpec("true"))


def test_reconnect_replaces_a_broken_connection(ssh_site: Site) -> None:
    server = ssh_site.server()
    with Fleet({0: ssh_site.target(server.port)}) as fleet:
        fleet.connect()
        server.drop()
        with pytest.raises(NodeError):
            fleet.run(0, CommandSpec("cat", stdin=b"x"))
        fleet.reconnect(0)
        replaced = fleet.connection(0)
        with pytest.raises(NodeError, match="no longer wanted"):
            fleet.reconnect(0, wanted=lambda: False)
        assert fleet.connection(0) is replaced
        assert fleet.run(0, CommandSpec("echo back")).stdout == b"back\n"
    with pytest.raises(NodeError, match="broke"):
        replaced.run(CommandSpec("true"))

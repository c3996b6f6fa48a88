"""A node whose SSH server is hostile loses its own connection, with an error that names it, and holds up no other node."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.hostilessh import HostileTransport, end, hostile, listening
from support.sshserver import Site, site

from cloudddp.config import timing
from cloudddp.errors import ConnectError, NodeError
from cloudddp.ssh import packets
from cloudddp.ssh.connection import Connection
from cloudddp.ssh.event_loop import event_loop
from cloudddp.ssh.fleet import Fleet
from cloudddp.ssh.loop_socket import LoopSocket
from cloudddp.ssh.running import CommandSpec, Result

HANG_GUARD = 60.0
MIB = 1 << 20
IGNORE, DEBUG, EXT_INFO, KEXINIT, GLOBAL_REQUEST = 2, 4, 7, 20, 80
CHANNEL_OPEN, WINDOW_ADJUST, DATA, CHANNEL_REQUEST = 90, 93, 94, 98
IDENTIFICATION = b"SSH-2.0-hostile\r\n"

Attack = Callable[[HostileTransport, Any], None]


@pytest.fixture
def ssh_site(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as created:
        yield created


@pytest.fixture
def loop_errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What was raised in threads, in that of the loop among others."""
    found: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    yield found
    assert found == []


def run_beside_another(ssh_site: Site, attack: Attack) -> tuple[Result | Exception, int]:
    """Run a command on the hostile node 0; return its end and how many commands node 1 has done meanwhile."""
    with hostile(ssh_site.host.private, attack) as port:
        targets = {0: ssh_site.target(port), 1: ssh_site.target(ssh_site.server().port, label="node 1 (i-1)")}
        with Fleet(targets) as fleet:
            fleet.connect()
            # The kernel would take 4 MiB of what the node does not read.
            transport: Any = fleet[0]._client.get_transport()
            transport.sock._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
            ends: list[Result | Exception] = []
            ended = threading.Event()

            def on_end(result: Result | Exception) -> None:
                ends.append(result)
                ended.set()

            fleet.start(0, CommandSpec("attack", command_timeout=HANG_GUARD), on_end)
            count = 0
            while not ended.wait(0.05):
                assert fleet.run(1, "echo honest").stdout == b"honest\n"
                count += 1
            assert fleet.run(1, "echo honest").stdout == b"honest\n"
            return ends[0], count


# -- work: the thread that all connections share --------------------------------------------------------------------


def test_reader_with_much_to_do_gives_way() -> None:
    """Each packet of the first connection takes longer than a turn lasts, and all have arrived with one read."""
    loop = event_loop()
    ours, theirs = socket.socketpair()
    stream = LoopSocket(ours, loop)
    packets, others = 20, 0
    at: list[int] = []
    done = threading.Event()

    def read() -> None:
        while len(at) < packets:
            try:
                stream.recv(1)
            except TimeoutError:  # a tick without data
                continue
            at.append(others)
            threading.Event().wait(0.01)
        done.set()

    def other() -> None:
        nonlocal others
        others += 1
        if not done.is_set():
            loop.call_soon(other)

    with theirs:
        theirs.sendall(bytes(packets))
        loop.spawn(read)
        loop.call_soon(other)
        assert done.wait(HANG_GUARD)
        stream.close()
    assert all(later > earlier for earlier, later in pairwise(at[1:]))


@pytest.mark.parametrize(
    "packet",
    [(IGNORE, b""), (DEBUG, False, b"", b""), (GLOBAL_REQUEST, b"k", False), (WINDOW_ADJUST, 0, 0)],
    ids=["ignore", "debug", "global request", "window"],
)
def test_flood_of_small_packets_does_not_hold_up_other_nodes(
    ssh_site: Site, packet: tuple[Any, ...], loop_errors: list[Any]
) -> None:
    def attack(transport: HostileTransport, channel: Any) -> None:
        transport.send_packet(*packet, count=60_000)
        end(channel)

    result, count = run_beside_another(ssh_site, attack)
    assert isinstance(result, Result), result
    assert count >= 1


def test_extensions_without_end_are_refused(ssh_site: Site, loop_errors: list[Any]) -> None:
    """paramiko would read as many as the packet announces: 4 billion."""
    result, _ = run_beside_another(ssh_site, lambda transport, _: transport.send_packet(EXT_INFO, 2**32 - 1))
    assert "node 0 (i-0): the SSH connection broke (it announced too many extensions)" in str(result)


def test_slow_key_exchange_methods_are_not_offered(ssh_site: Site) -> None:
    """The server chooses the group: 8192 bits take Python a second, in which no other thread runs."""
    server = ssh_site.server()
    with closing(Connection.open(ssh_site.target(server.port))) as connection:
        transport = connection._client.get_transport()
        assert transport is not None
        offered = transport.get_security_options().kex
    assert offered
    assert not [one for one in offered if "group" in one]


# -- before the host key is checked -----------------------------------------------------------------------------------


def endless(data: bytes, first: bytes = b"") -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        connection.sendall(first)
        while True:
            connection.sendall(data)
            sent.append(len(data))

    sent: list[int] = []
    serve.sent = sent  # type: ignore[attr-defined]
    return serve


@pytest.mark.parametrize(
    "line", [bytes(65536), b"x" * 300 + b"\n", b"\n"], ids=["no end", "long lines", "many lines"]
)
def test_endless_identification_is_refused(ssh_site: Site, line: bytes, loop_errors: list[Any]) -> None:
    serve = endless(line * (65536 // len(line)))
    with listening(serve) as port, pytest.raises(ConnectError, match=r"node 0 .* does not speak SSH"):
        Connection.open(ssh_site.target(port), connect_timeout=HANG_GUARD)
    assert sum(serve.sent) < 16 * MIB  # type: ignore[attr-defined]


def test_lines_before_the_identification_are_skipped(ssh_site: Site) -> None:
    """RFC 4253, section 4.2 allows them."""
    server = ssh_site.server()

    def serve(connection: socket.socket) -> None:
        connection.sendall(b"Welcome\r\n" * 20 + b"x" * 250 + b"\r\n")
        with socket.create_connection(("127.0.0.1", server.port)) as inner:
            threading.Thread(target=carry, args=(connection, inner), daemon=True).start()
            carry(inner, connection)

    def carry(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            sink.sendall(data)

    with listening(serve) as port, closing(Connection.open(ssh_site.target(port))) as connection:
        assert connection.run("echo good").stdout == b"good\n"


@pytest.mark.parametrize("length", [0x7FFFFFFC, 40_004], ids=["2 GiB", "40 kB"])
def test_long_packet_before_the_key_exchange_is_refused(
    ssh_site: Site, length: int, loop_errors: list[Any]
) -> None:
    serve = endless(bytes(65536), IDENTIFICATION + length.to_bytes(4, "big"))
    with listening(serve) as port, pytest.raises(ConnectError, match=r"node 0 .* it announced a packet of"):
        Connection.open(ssh_site.target(port), connect_timeout=HANG_GUARD)
    assert sum(serve.sent) < 16 * MIB  # type: ignore[attr-defined]


def test_invalid_packet_before_the_key_exchange_is_an_error(ssh_site: Site, loop_errors: list[Any]) -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(IDENTIFICATION + bytes.fromhex("0000000c0a") + bytes([255, *bytes(10)]))
        connection.recv(1 << 16)
        threading.Event().wait(HANG_GUARD)

    with listening(serve) as port, pytest.raises(ConnectError, match=r"node 0"):
        Connection.open(ssh_site.target(port), connect_timeout=HANG_GUARD)


# -- memory -------------------------------------------------------------------------------------------------------------


def peer_that_does_not_read(transport: HostileTransport, _channel: Any) -> None:
    transport.stop_reading()
    while transport.is_active():
        transport.send_packet(GLOBAL_REQUEST, b"k", True, count=3000)


def open_channels(transport: HostileTransport, _channel: Any) -> None:
    transport.stop_reading()
    while transport.is_active():
        for kind in (b"session", b"x11", b"auth-agent@openssh.com", b"forwarded-tcpip"):
            transport.send_packet(CHANNEL_OPEN, kind, 7, MIB, 32768, count=1000)


def ask_on_the_channel(transport: HostileTransport, channel: Any) -> None:
    transport.stop_reading()
    while transport.is_active():
        transport.send_packet(CHANNEL_REQUEST, channel.remote_chanid, b"xon-xoff", True, count=3000)


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (lambda t, _: t.send_raw((0x40000000).to_bytes(4, "big") + bytes(MIB)), "it announced a packet of"),
        (lambda t, _: t.send_raw((300 << 10).to_bytes(4, "big") + bytes(MIB)), "it announced a packet of"),
        (lambda t, _: t.send_raw(bytes(64)), "it sent an invalid packet"),
        (lambda t, _: t.send_raw((60).to_bytes(4, "big") + bytes(100)), "it sent an invalid packet"),
        (lambda t, _: t.send_packet(200), "it sent an invalid packet"),
        (
            lambda t, _: t.send_packet(IGNORE, b"") or t.send_payload(b"\x50\0\0\0\2\xff\xff\1"),
            "invalid packet",
        ),
        (lambda t, _: t.send_payload(b"\x15"), "it sent an invalid packet"),
        (lambda t, _: t.send_payload(bytes([KEXINIT]) + bytes(60_000)), "key exchange is longer than 35000"),
        (lambda t, c: t.send_packet(WINDOW_ADJUST, c.remote_chanid, 2**32 - 1), "increased a window beyond"),
        (lambda t, _: t.send_packet(DATA, 12345, b"x"), "connection closed"),
        (peer_that_does_not_read, "it does not read: more than 128 KiB wait"),
        (open_channels, "it does not read: more than 128 KiB wait"),
        (ask_on_the_channel, "it does not read: more than 128 KiB wait"),
    ],
    ids=[
        "1 GiB packet",
        "300 KiB packet",
        "short packet",
        "not authentic",
        "unknown message",
        "not UTF-8",
        "unexpected keys",
        "long lists",
        "window overflow",
        "unknown channel",
        "global requests",
        "channels",
        "channel requests",
    ],
)
def test_attack_ends_that_nodes_connection_alone(
    ssh_site: Site, attack: Attack, reason: str, loop_errors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packets, "MOST_UNSENT", 128 << 10)  # 8 MiB of answers take 10 s
    result, _ = run_beside_another(ssh_site, attack)
    assert isinstance(result, NodeError), result
    assert "node 0 (i-0)" in str(result)
    assert reason in str(result)


def test_data_beyond_the_window_ends_the_connection(ssh_site: Site, loop_errors: list[Any]) -> None:
    def attack(transport: HostileTransport, channel: Any) -> None:
        transport.send_packet(DATA, channel.remote_chanid, bytes(30_000), count=3000)

    def read_slowly(_data: bytes) -> None:
        transport.join(HANG_GUARD)

    with (
        hostile(ssh_site.host.private, attack) as port,
        closing(Connection.open(ssh_site.target(port))) as connection,
    ):
        transport: Any = connection._client.get_transport()
        with pytest.raises(NodeError, match=r"node 0 .*\(it sent more than the window of a channel allows"):
            connection.run("attack", on_stdout=read_slowly, window=2 * MIB)


@pytest.mark.parametrize("seed", range(20))
def test_random_packets_end_in_an_error_or_a_result(
    ssh_site: Site, seed: int, loop_errors: list[Any]
) -> None:
    chance = random.Random(seed)
    fields = (b"", bytes(4), b"\xff" * 4, b"\0\0\0\2\xff\xfe", b"\0\0\0\x0bexit-status\1", b"\0\0\0\5hello")

    def attack(transport: HostileTransport, channel: Any) -> None:
        for _ in range(30):
            kind = chance.choice([*range(1, 8), 20, 21, 30, 31, *range(50, 54), *range(80, 101), 192])
            to = channel.remote_chanid.to_bytes(4, "big") if kind > CHANNEL_OPEN else b""
            body = b"".join(chance.choice(fields) for _ in range(chance.randrange(6)))
            transport.send_payload(bytes([kind]) + to + body + chance.randbytes(chance.choice([0, 9, 500])))
        end(channel)

    with (
        hostile(ssh_site.host.private, attack) as port,
        closing(Connection.open(ssh_site.target(port))) as connection,
    ):
        try:
            connection.run("attack", command_timeout=10)
        except NodeError as error:
            assert "node 0 (i-0)" in str(error)


# -- key exchanges --------------------------------------------------------------------------------------------------------


def test_key_exchange_that_never_ends_closes_the_connection(
    ssh_site: Site, loop_errors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attack(transport: HostileTransport, _channel: Any) -> None:
        transport.silent_exchange = True
        transport._send_kex_init()

    monkeypatch.setenv(timing.VARIABLE, "0.05")  # Timing.dead becomes 2.25 s
    result, count = run_beside_another(ssh_site, attack)
    assert "node 0 (i-0): the SSH connection broke (its key exchange did not end within 2.25 s)" in str(
        result
    )
    assert count >= 1


def test_messages_during_a_key_exchange_are_sent_after_it(ssh_site: Site) -> None:
    server = ssh_site.server()
    with closing(Connection.open(ssh_site.target(server.port))) as connection:
        transport = connection._client.get_transport()
        assert transport is not None
        data = os.urandom(3 * MIB)

        def pieces() -> Iterator[bytes]:
            for at in range(0, len(data), 1 << 16):
                if at % (1 << 18) == 0:
                    transport._send_kex_init()
                yield data[at : at + (1 << 16)]

        assert connection.run("cat", stdin=pieces()).stdout == data
    assert len(server.connections) == 1

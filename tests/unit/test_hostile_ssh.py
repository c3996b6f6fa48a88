"""A node whose SSH server sends what no honest server sends loses its own connection, with an error that
names it."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from support.hostilessh import HostileTransport, end, hostile, listening
from support.sshserver import Site

from cloudddp.errors import ConnectError, NodeError
from cloudddp.ssh.connection import Connection
from cloudddp.ssh.running import CommandSpec

HANG_GUARD = 300.0
MIB = 1 << 20
KEXINIT, CHANNEL_OPEN = 20, 90
IDENTIFICATION = b"SSH-2.0-hostile\r\n"

Attack = Callable[[HostileTransport, Any], None]


@pytest.fixture(autouse=True)
def thread_errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What was raised in threads, which would print a traceback."""
    found: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    yield found
    assert found == []


def run_attack(ssh_site: Site, attack: Attack, **limits: Any) -> NodeError:
    """Run a command on the hostile node, and return its error."""
    with (
        hostile(ssh_site.host.private, attack) as port,
        closing(Connection.open(ssh_site.target(port))) as connection,
        pytest.raises(NodeError) as caught,
    ):
        connection.run(CommandSpec("attack", **{"command_timeout": HANG_GUARD, **limits}))
    assert "node 0 (i-0)" in caught.value.message
    return caught.value


# -- before the host key is checked --------------------------------------------------------------------------


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
def test_endless_identification_is_refused(ssh_site: Site, line: bytes) -> None:
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
        with suppress(OSError):  # the test has ended, and the connection is closed
            while data := source.recv(1 << 16):
                sink.sendall(data)

    with listening(serve) as port, closing(Connection.open(ssh_site.target(port))) as connection:
        assert connection.run(CommandSpec("echo good")).stdout == b"good\n"


def test_long_packet_before_the_key_exchange_is_refused(ssh_site: Site) -> None:
    serve = endless(bytes(65536), IDENTIFICATION + (0x7FFFFFFC).to_bytes(4, "big"))
    with listening(serve) as port, pytest.raises(ConnectError, match=r"node 0 .* it announced a packet of"):
        Connection.open(ssh_site.target(port), connect_timeout=HANG_GUARD)
    assert sum(serve.sent) < 16 * MIB  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "packet",
    [bytes.fromhex("0000000c0a") + bytes([255, *bytes(10)]), bytes.fromhex("0000000c0a14") + b"\xff" * 10],
    ids=["padding", "lists"],
)
def test_invalid_packet_before_the_key_exchange_is_an_error(ssh_site: Site, packet: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(IDENTIFICATION + packet)
        connection.recv(1 << 16)
        threading.Event().wait(HANG_GUARD)

    with listening(serve) as port, pytest.raises(ConnectError, match=r"node 0"):
        Connection.open(ssh_site.target(port), connect_timeout=HANG_GUARD)


def test_slow_key_exchange_methods_are_not_offered(ssh_site: Site) -> None:
    """The server chooses the group: 8192 bits take Python a second, in which no other thread runs."""
    server = ssh_site.server()
    with closing(Connection.open(ssh_site.target(server.port))) as connection:
        transport = connection._client.get_transport()
        assert transport is not None
        offered = transport.get_security_options().kex
    assert offered
    assert not [one for one in offered if "group" in one]


# -- after the login -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (lambda t, _: t.send_raw((0x40000000).to_bytes(4, "big") + bytes(MIB)), "it announced a packet of"),
        (lambda t, _: t.send_raw((300 << 10).to_bytes(4, "big") + bytes(MIB)), "it announced a packet of"),
        (lambda t, _: t.send_raw((60).to_bytes(4, "big") + bytes(100)), "it sent an invalid packet"),
        (lambda t, _: t.send_payload(b"\x15"), "it sent an invalid packet"),
    ],
    ids=["1 GiB packet", "300 KiB packet", "not authentic", "unexpected keys"],
)
def test_invalid_packet_is_an_error_of_the_node(ssh_site: Site, attack: Attack, reason: str) -> None:
    assert reason in run_attack(ssh_site, attack).message


@pytest.mark.parametrize("seed", range(5))
def test_random_packets_end_in_an_error_or_a_result(ssh_site: Site, seed: int) -> None:
    chance = random.Random(seed)
    fields = (b"", bytes(4), b"\xff" * 4, b"\0\0\0\2\xff\xfe", b"\0\0\0\x0bexit-status\1", b"\0\0\0\5hello")

    def attack(transport: HostileTransport, channel: Any) -> None:
        for _ in range(30):
            kind = chance.choice([*range(1, 7), 20, 21, 30, 31, *range(50, 54), *range(80, 101), 192])
            to = channel.remote_chanid.to_bytes(4, "big") if kind > CHANNEL_OPEN else b""
            body = b"".join(chance.choice(fields) for _ in range(chance.randrange(6)))
            transport.send_payload(bytes([kind]) + to + body + chance.randbytes(chance.choice([0, 9, 500])))
        end(channel)

    with (
        hostile(ssh_site.host.private, attack) as port,
        closing(Connection.open(ssh_site.target(port))) as connection,
    ):
        try:
            connection.run(CommandSpec("attack", command_timeout=5))
        except NodeError as error:
            assert "node 0 (i-0)" in str(error)


# -- key exchanges -------------------------------------------------------------------------------------------


def stall(transport: HostileTransport, _channel: Any) -> None:
    """Begin a key exchange that does not end."""
    transport.silent_exchange = True
    transport._send_kex_init()


def test_key_exchange_that_never_ends_does_not_outlast_the_limit_of_a_command(ssh_site: Site) -> None:
    assert "no answer for 2 s" in run_attack(ssh_site, stall, command_timeout=2).message


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

        assert connection.run(CommandSpec("cat", stdin=pieces())).stdout == data
    assert len(server.connections) == 1

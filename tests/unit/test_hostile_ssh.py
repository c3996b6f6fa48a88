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


def run_attack(ssh_site: Site, attack: Attack) -> NodeError:
    """Run a command on the hostile node, and return its error."""
    with (
        hostile(ssh_site.host.private, attack) as port,
        closing(Connection.open(ssh_site.target(port))) as connection,
        pytest.raises(NodeError) as caught,
    ):
        connection.run(CommandSpec("attack", b"x", command_timeout=HANG_GUARD))
    assert "node 0 (i-0)" in caught.value.message
    return caught.value


# -- before the host key is checked --------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (lambda t, _: t.send_raw((60).to_bytes(4, "big") + bytes(100)), "it sent an invalid packet"),
        (lambda t, _: t.send_payload(b"\x15"), "it sent an invalid packet"),
    ],
    ids=["not authentic", "unexpected keys"],
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
            connection.run(CommandSpec("attack", b"x", command_timeout=5))
        except NodeError as error:
            assert "node 0 (i-0)" in str(error)


def test_messages_during_a_key_exchange_are_sent_after_it(ssh_site: Site) -> None:
    server = ssh_site.server()
    with closing(Connection.open(ssh_site.target(server.port))) as connection:
        data = os.urandom(3 * MIB)

        def pieces() -> Iterator[bytes]:
            for at in range(0, len(data), 1 << 16):
                if at % (1 << 18) == 0:
                    connection.transport._send_kex_init()
                yield data[at : at + (1 << 16)]

        assert connection.run(CommandSpec("cat", stdin=pieces())).stdout == data
    assert len(server.connections) == 1

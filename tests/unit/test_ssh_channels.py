"""The channels of an SSH connection: several at once, what is sent late, how far a server may send ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paramiko
import pytest
from support.sshserver import Server, Site

from cloudddp.ssh.connection import Connection
from cloudddp.ssh.fleet import Fleet
from cloudddp.ssh.running import CommandSpec, Input
from cloudddp.ssh.time_limits import Activity
from cloudddp.ssh.transport import BoundedPacketizer

MIB = 1 << 20
HANG_GUARD = 60.0  # seconds; only a hang is this long


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The channels that paramiko has closed during the test."""
    closed: list[paramiko.Channel] = []
    set_closed = paramiko.Channel._set_closed

    def keep(channel: paramiko.Channel) -> None:
        closed.append(channel)
        set_closed(channel)

    monkeypatch.setattr(paramiko.Channel, "_set_closed", keep)
    return closed


def send_late(channel: Any, kind: int, *fields: int | bytes) -> None:
    """Send a packet that paramiko decided to send before the channel was closed, as a slow thread does."""
    message = paramiko.Message()
    message.add_byte(bytes([kind]))
    message.add_int(channel.remote_chanid)
    for field in fields:
        message.add_int(field) if isinstance(field, int) else message.add_string(field)
    channel.transport._send_user_message(message)


@pytest.mark.parametrize("late", [(93, 300_000), (94, b"data"), (96,)], ids=["window", "data", "eof"])
def test_nothing_is_sent_after_close(
    connection: Connection, server: Server, channels: list[Any], late: tuple[int, ...]
) -> None:
    assert connection.run(CommandSpec("true")).exit_code == 0
    send_late(channels[0], *late)
    assert connection.run(CommandSpec("echo still here")).stdout == b"still here\n"
    assert len(server.connections) == 1


def test_no_data_is_sent_after_eof(connection: Connection, server: Server) -> None:
    """paramiko answers CLOSE by EOF and CLOSE, and the thread that sends input may send in between."""

    def pieces() -> Iterator[bytes]:
        yield b"data"
        (channel,) = transport._channels.values()
        channel.shutdown_write()
        send_late(channel, 94, b"late")

    transport = connection._client.get_transport()
    assert transport is not None
    assert connection.run(CommandSpec("cat", stdin=pieces())).stdout == b"data"
    assert connection.run(CommandSpec("echo still here")).stdout == b"still here\n"
    assert len(server.connections) == 1


def test_reused_channel_number_is_open_again(
    connection: Connection, server: Server, channels: list[Any]
) -> None:
    assert connection.run(CommandSpec("true")).exit_code == 0
    number = channels[0].remote_chanid
    while number in server.connections[0]._channels:
        time.sleep(0.01)  # until the answer to its CLOSE arrives
    server.connections[0]._next_recv_chan = number  # sshd uses the lowest free number
    assert connection.run(CommandSpec("cat", stdin=b"data")).stdout == b"data"
    assert channels[-1].remote_chanid == number


def test_command_is_closed_on_a_connection_that_has_just_broken(connection: Connection) -> None:
    """Its transport has not noticed yet. An error here would take the place of the one that the user
    needs."""
    begun: list[bytes] = []
    activity = Activity(HANG_GUARD, None)
    running = connection.start("echo on; cat", activity)
    until = lambda: bool(begun)  # noqa: E731
    running.exchange(Input(b""), (begun.append, len), activity, until=until, keep_open=True)
    assert begun == [b"on\n"]
    transport = connection._client.get_transport()
    assert transport is not None
    transport.sock.close()
    running.close()


def test_long_streams_need_no_key_exchange() -> None:
    """paramiko's thread that answers CLOSE also carries out a key exchange, and waits for its own end."""
    assert BoundedPacketizer.REKEY_BYTES == 64 << 30 > paramiko.packet.Packetizer.REKEY_BYTES


def test_concurrent_commands_share_a_connection(connection: Connection, server: Server) -> None:
    together = threading.Barrier(8, timeout=60)

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


# -- the window ----------------------------------------------------------------------------------------------


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

    connection.run(
        CommandSpec(
            f"for k in 1 2 3 4 5 6 7 8 9 10 11 12 13 14; do printf x >> {sent}; head -c {MIB} /dev/zero; "
            "done",
            on_stdout=read,
        )
    )
    assert len(received) == 14 * MIB


def test_windows_of_many_nodes_are_limited_together(ssh_site: Site, server: Server) -> None:
    for nodes, window in ((1, 16 * MIB), (8, 16 * MIB), (16, 8 * MIB), (1000, 2 * MIB)):
        targets = dict.fromkeys(range(nodes), ssh_site.target(server.port))
        with Fleet(targets) as fleet:
            assert fleet.window == window

"""Packets for a channel after its EOF or close: a loopback node handles them as OpenSSH's sshd."""

from __future__ import annotations

import contextlib
from typing import Any

import paramiko
import pytest
from paramiko.packet import Packetizer
from support.harness import until
from support.simlab import Laptop, execute

WINDOW_ADJUST, DATA, EOF = 93, 94, 96


@pytest.fixture
def client(node: tuple[Laptop, dict[str, Any]]) -> paramiko.SSHClient:
    laptop, instance = node
    return laptop.connect(instance["PublicIpAddress"])


def closed_channel(client: paramiko.SSHClient) -> int:
    """Return the server's number of a channel that both sides have closed."""
    channel = client.get_transport().open_session()
    channel.exec_command("true")
    until(lambda: channel.closed)
    return channel.remote_chanid


def send(client: paramiko.SSHClient, kind: int, number: int, *fields: int | bytes) -> None:
    message = paramiko.Message()
    message.add_byte(bytes([kind]))
    message.add_int(number)
    for field in fields:
        message.add_int(field) if isinstance(field, int) else message.add_string(field)
    # As paramiko does: cloudddp's transport sends nothing late.
    Packetizer.send_message(client.get_transport().packetizer, message)


@pytest.mark.parametrize("late", [(DATA, b"late"), (EOF,)], ids=["data", "eof"])
def test_data_and_eof_after_eof_are_ignored(client: paramiko.SSHClient, late: tuple[Any, ...]) -> None:
    kind, *fields = late
    channel = client.get_transport().open_session()
    execute(client, "test -p pipe || mkfifo pipe")
    channel.exec_command("cat; read -r answer < pipe; echo $answer")
    channel.sendall(b"data\n")
    channel.shutdown_write()
    send(client, kind, channel.remote_chanid, *fields)
    execute(client, "echo on > pipe")
    assert channel.makefile().read() == b"data\non\n"


def test_window_adjust_for_a_closed_channel_is_ignored(client: paramiko.SSHClient) -> None:
    for _ in range(20):  # before or after the server has removed the channel
        send(client, WINDOW_ADJUST, closed_channel(client), 300_000)
    assert execute(client, "echo still here").out == b"still here\n"


@pytest.mark.parametrize("late", [(DATA, b"late"), (EOF,)], ids=["data", "eof"])
def test_data_and_eof_for_a_closed_channel_close_the_connection(
    client: paramiko.SSHClient, late: tuple[Any, ...]
) -> None:
    kind, *fields = late
    number = closed_channel(client)  # sshd keeps it for some milliseconds

    def refused() -> bool:
        with contextlib.suppress(EOFError, OSError):  # closed, but paramiko has not noticed yet
            send(client, kind, number, *fields)
        return not client.get_transport().is_active()

    until(refused)

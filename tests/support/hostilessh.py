"""SSH servers that accept every login and then send what no honest server sends."""

from __future__ import annotations

import contextlib
import io
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import paramiko

Attack = Callable[["HostileTransport", paramiko.Channel], None]


class HostileTransport(paramiko.Transport):  # type: ignore[misc]  # paramiko has no types
    """A server's side of a connection."""

    def send_payload(self, payload: bytes) -> None:
        """Send a packet, whatever is due at that moment."""
        packets: list[bytes] = []
        write_all = self.packetizer.write_all
        self.packetizer.write_all = packets.append
        try:
            self.packetizer.send_message(paramiko.Message(payload))
        finally:
            self.packetizer.write_all = write_all
        self.send_raw(b"".join(packets))

    def send_raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        with contextlib.suppress(EOFError):
            self.packetizer.write_all(data)


class Accepting(paramiko.ServerInterface):  # type: ignore[misc]
    def get_allowed_auths(self, _user: str) -> str:
        return "publickey"

    def check_auth_publickey(self, _user: str, _key: paramiko.PKey) -> int:
        return int(paramiko.AUTH_SUCCESSFUL)

    def check_channel_request(self, _kind: str, _number: int) -> int:
        return int(paramiko.OPEN_SUCCEEDED)


class _Attacking(Accepting):
    def __init__(self, transport: HostileTransport, attack: Attack) -> None:
        self._transport, self._attack = transport, attack

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        threading.Thread(target=self._run, args=(channel, command), daemon=True).start()
        return True

    def _run(self, channel: paramiko.Channel, command: bytes) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            markers = subprocess.run(
                ["sh", "-c", command.partition(b"\n")[0]], capture_output=True, check=True
            )
            channel.sendall(markers.stdout)
            channel.sendall_stderr(markers.stderr)
            channel.recv(1)  # the client sends input, and so has read that the command has begun
            self._attack(self._transport, channel)


def end(channel: paramiko.Channel) -> None:
    """End a command as an honest server does."""
    channel.send_exit_status(0)
    channel.close()


@contextlib.contextmanager
def hostile(host_key: str, attack: Attack) -> Iterator[int]:
    """The port of a server that calls `attack` for each command."""

    def serve(connection: socket.socket) -> None:
        transport = transport_of(connection, host_key)
        with contextlib.suppress(paramiko.SSHException, EOFError):
            transport.start_server(server=_Attacking(transport, attack))

    with listening(serve) as port:
        yield port


def transport_of(connection: socket.socket, host_key: str) -> HostileTransport:
    transport = HostileTransport(connection)
    transport.add_server_key(paramiko.Ed25519Key.from_private_key(io.StringIO(host_key)))
    return transport


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], Any]) -> Iterator[int]:
    """The port of a server that calls a function for each connection, in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)  # what it does not read soon waits
        accepted: list[socket.socket] = []

        def talk(connection: socket.socket) -> None:
            with contextlib.suppress(OSError):
                serve(connection)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    accepted.append(connection)
                    threading.Thread(target=talk, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            for connection in accepted:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()

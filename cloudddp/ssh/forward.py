"""Ports of this computer's loopback that lead to ports of a node's, over an open connection."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

from cloudddp.ssh.connection import LOOPBACK, Connection
from cloudddp.ssh.running import CHUNK


class Forward(socketserver.ThreadingTCPServer):
    """A port of this computer, until this process ends. Connections wait for `start`."""

    allow_reuse_address = daemon_threads = True
    request_queue_size = 64

    def __init__(self, local: int = 0, remote: int = 0) -> None:
        """`local`: 0 for any that is free. Raises OSError if it is in use."""
        super().__init__((LOOPBACK, local), socketserver.BaseRequestHandler)
        self.local, self.remote = int(self.socket.getsockname()[1]), remote
        self._refused = ""

    def start(self, connection: Connection, on_refused: Callable[[str], None]) -> None:
        """Begin to serve. `on_refused`, called in any thread, gets each reason of a refusal once."""
        self._connection, self._on_refused = connection, on_refused
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  a thread for each
        try:
            with contextlib.closing(self._connection.open_port(self.remote)) as channel:
                to_client = channel.recv, request.sendall, lambda: request.shutdown(socket.SHUT_WR)
                answers = threading.Thread(target=_copy, args=to_client, daemon=True)
                answers.start()
                _copy(request.recv, channel.sendall, channel.shutdown_write)
                answers.join()
        except OSError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                self._on_refused(self._refused)


def _copy(receive: Callable[[int], bytes], send: Callable[[bytes], Any], end: Callable[[], Any]) -> None:
    """Copy a stream to its end, and pass the end on."""
    with contextlib.suppress(OSError, EOFError):
        while data := receive(CHUNK):
            send(data)
    with contextlib.suppress(OSError, EOFError):
        end()

"""Requests of the node's commands to its init: one JSON object over a Unix socket, one JSON object back."""

from __future__ import annotations

import json
import signal
import socket
import sys

from . import on_node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def request(
    message: dict[str, Any], descriptors: tuple[int, ...] = (), *, relay: bool = False
) -> dict[str, Any]:
    """Return init's reply. `relay`: pass on signals that arrive meanwhile. Exits if init does not respond."""
    on_node.require()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(on_node.SOCKET)
            data = json.dumps(message).encode() + b"\n"
            sent = socket.send_fds(connection, [data], list(descriptors))
            if sent < len(data):  # sending nothing fails once init has replied
                connection.sendall(data[sent:])
            for number in _RELAYED if relay else ():
                signal.signal(number, lambda received, _frame: connection.send(bytes([received])))
            reply = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    except OSError as error:
        sys.exit(f"the node's init does not respond: {error}")
    return dict(json.loads(reply)) if reply else {"error": "the node is shutting down"}

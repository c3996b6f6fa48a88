"""The HTTP server of the metadata service. It closes connections that do not come from a node."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.client import responses
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cloudddp.simulator.metadata.service import Metadata

ADDRESS = ("169.254.169.254", 80)

_CONNECTION_SECONDS = 10.0  # for a connection in total, whether or not it is active
_MAX_CONNECTIONS = 64  # of one node at a time, so that it cannot keep the others from being served


class MetadataServer(ThreadingHTTPServer):
    """Listens in the network namespace of this process. Raises OSError."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self._connections: dict[socket.socket, tuple[str, float]] = {}  # peer address, deadline
        self._lock = threading.Lock()
        super().__init__(ADDRESS, _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            count = sum(address == client_address[0] for address, _ in self._connections.values())
            if count >= _MAX_CONNECTIONS or not self.metadata.is_instance(client_address[0]):
                return False
            self._connections[request] = (client_address[0], time.monotonic() + _CONNECTION_SECONDS)
        return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close overdue connections. Called between connections, and at least twice a second."""
        now = time.monotonic()
        with self._lock:
            for request, (_, deadline) in self._connections.items():
                if deadline < now:
                    with contextlib.suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def server_bind(self) -> None:
        # HTTPServer's own resolves the address by DNS, which the lab does not have.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = ADDRESS

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that disconnects early


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "EC2ws", ""
    timeout = _CONNECTION_SECONDS
    server: MetadataServer

    def _respond(self) -> None:
        self.close_connection = True
        metadata = self.server.metadata
        response = metadata.respond(self.command, self.path, self.headers, self.client_address[0])
        if response is None:
            return
        self.connection.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, response.hops)
        ok = response.status == 200
        body = response.body if ok else _error_page(response.status)
        self.send_response(response.status)
        for name, value in (*response.headers, ("Content-Type", "text/plain" if ok else "text/html")):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = do_OPTIONS = _respond  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        pass


def _error_page(status: int) -> bytes:
    return f"<html><head><title>{status} - {responses[status]}</title></head></html>\n".encode()

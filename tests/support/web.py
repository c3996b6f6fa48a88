"""HTTP servers on this computer, which tests answer for."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Serves in threads until it is closed."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler], address: tuple[str, int] = ("127.0.0.1", 0)):
        super().__init__(address, handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()  # which waits for one poll
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """For classes that also name BaseHTTPRequestHandler as a base: ruff allows do_GET in these."""

    def answer(self, status: int, body: bytes | str = b"", **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)  # with the Date
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Silent."""

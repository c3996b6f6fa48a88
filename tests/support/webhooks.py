"""A server on 127.0.0.1 that takes notifications, and answers as a test wants."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.agentnode import until

SECRET = "T0000/B0000/hook-secret-of-the-path"
HANG_GUARD = 60.0  # seconds


class Webhook(ThreadingHTTPServer):
    """`bodies` are the messages, in order. `status`: its answer; None: one byte a second, without an end."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.status: int | None = 200
        self.delay = 0.0  # seconds
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/{SECRET}?a=b"

    @property
    def events(self) -> list[str]:
        return [one["event"] for one in self.bodies]

    def wait(self, *events: str) -> dict[str, Any]:
        """Wait until exactly these events have come; return the last message."""
        until(lambda: len(self.bodies) >= len(events), HANG_GUARD)
        assert self.events == list(events)
        return self.bodies[-1]

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.append(self.path)
        if self.server.status is None:
            for _ in range(int(HANG_GUARD)):
                self.wfile.write(b"H")
                time.sleep(1)
            return
        time.sleep(self.server.delay)
        self.server.bodies.append(json.loads(body))
        self.send_response(self.server.status)
        self.send_header("Location", f"http://localhost:{self.server.server_port}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST  # noqa: N815  the name that http.server looks for

    def log_message(self, *_: Any) -> None:
        pass

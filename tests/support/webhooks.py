"""A server on 127.0.0.1 that takes notifications, and answers as a test wants."""

from __future__ import annotations

import json
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.agentnode import until
from support.web import Handler, Server

SECRET = "T0000/B0000/hook-secret-of-the-path"
HANG_GUARD = 300.0  # seconds


class Webhook(Server):
    """`bodies` are the messages, in order. `status`: its answer; None: one byte a second, without an end."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.status: int | None = 200
        self.delay = 0.0  # seconds

    @property
    def url(self) -> str:
        return f"http://{self.address}/services/{SECRET}?a=b"

    @property
    def events(self) -> list[str]:
        return [one["event"] for one in self.bodies]

    def wait(self, *events: str) -> dict[str, Any]:
        """Wait until exactly these events have come; return the last message."""
        until(lambda: len(self.bodies) >= len(events), HANG_GUARD)
        assert self.events == list(events)
        return self.bodies[-1]


class _Handler(Handler, BaseHTTPRequestHandler):
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
        self.answer(self.server.status, Location=f"http://localhost:{self.server.server_port}/elsewhere")

    do_GET = do_POST  # noqa: N815  the name that http.server looks for

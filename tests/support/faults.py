"""An AWS endpoint that forwards to the simulator, counts calls, and fails on request.

It is a proxy between a real process and a real endpoint, so that faults are injected into AWS's answers. Each
rule applies to one EC2 action.
"""

from __future__ import annotations

import functools
import http.server
import json
import re
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable
from typing import Any

ERROR = """<?xml version="1.0" encoding="UTF-8"?>
<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors><RequestID>1</RequestID></Response>"""

Rewrite = Callable[[bytes], bytes]


class FaultyEndpoint:
    """`with FaultyEndpoint(url) as endpoint`: `endpoint.url` behaves like `url`, except for the rules."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.calls: list[str] = []
        self._placed: list[str] = []  # the same, with @ and the region
        self.date = ""  # the time of every answer; '' for the current time
        self._errors: dict[str, deque[tuple[int, str, str]]] = {}
        self._rewrites: dict[str, Rewrite] = {}
        self._gates: dict[str, tuple[threading.Event, threading.Event]] = {}
        self._lost: dict[str, int] = {}
        self._late: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()

    def fail(
        self,
        action: str,
        code: str,
        *,
        times: int = 1,
        status: int = 400,
        message: str = "injected by the test",
    ) -> None:
        """Answer the next `times` calls with an error; they have no effect. `action` may end in @ and a
        region."""
        self._errors.setdefault(action, deque()).extend([(status, code, message)] * times)

    def clear(self) -> None:
        """Remove every planned failure."""
        self._errors.clear()

    def rewrite(self, action: str, change: Rewrite) -> None:
        """Change the body of every answer to this action."""
        self._rewrites[action] = change

    def hold(self, action: str) -> tuple[threading.Event, threading.Event]:
        """Forward the action but hold back its answer. Return events: (a call has arrived, release the
        answer)."""
        self._gates[action] = (threading.Event(), threading.Event())
        return self._gates[action]

    def lose_answer(self, action: str, *, times: int = 1) -> None:
        """Forward the next `times` calls, and close the connection instead of answering."""
        self._lost[action] = times

    def complete_late(self, action: str, seconds: float, *, times: int = 5) -> None:
        """Close the connection of the next `times` calls, which a client tries in all, and forward the last
        one later."""
        self._late[action] = (times, seconds)

    def count(self, action: str) -> int:
        """Return the number of calls, failed ones too. `action` may end in @ and a region."""
        return (self._placed if "@" in action else self.calls).count(action)

    def __enter__(self) -> FaultyEndpoint:
        endpoint = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                endpoint._serve(self)

            def date_time_string(self, timestamp: float | None = None) -> str:
                return endpoint.date or super().date_time_string(timestamp)

            def log_message(self, *_: Any) -> None:
                """Silent."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        # shutdown() waits for one poll.
        serve = functools.partial(self._server.serve_forever, poll_interval=0.02)
        threading.Thread(target=serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for _, release in self._gates.values():
            release.set()
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        action = self._action(handler, body)
        with self._lock:
            self.calls.append(action)
            region = re.search(r"Credential=[^/]+/\d+/([^/]+)/", handler.headers.get("Authorization", ""))
            placed = f"{action}@{region[1]}" if region else ""
            self._placed.append(placed)
            planned = self._errors.get(placed) or self._errors.get(action)
            error = planned.popleft() if planned else None
        if error:
            status, code, message = error
            body = ERROR.format(code=code, message=message).encode()
            self._answer(handler, status, body, "text/xml")
            return
        if self._postponed(action, handler, body):
            handler.close_connection = True
            return
        status, answer, kind = self._forward(handler, body)
        if self._lost.get(action, 0) > 0:
            self._lost[action] -= 1
            handler.close_connection = True
            return
        if action in self._rewrites:
            answer = self._rewrites[action](answer)
        if action in self._gates:
            reached, release = self._gates[action]
            reached.set()
            release.wait(60)
        self._answer(handler, status, answer, kind)

    def _postponed(self, action: str, handler: http.server.BaseHTTPRequestHandler, body: bytes) -> bool:
        with self._lock:
            times, seconds = self._late.get(action, (0, 0.0))
            if not times:
                return False
            self._late[action] = (times - 1, seconds)
        if times == 1:
            timer = threading.Timer(seconds, self._forward, (handler, body))
            timer.daemon = True
            timer.start()
        return True

    @staticmethod
    def _action(handler: http.server.BaseHTTPRequestHandler, body: bytes) -> str:
        if target := handler.headers.get("X-Amz-Target"):
            return target.rsplit(".", 1)[-1]
        query = urllib.parse.parse_qs(body.decode())
        action = query.get("Action", ["?"])[0]
        return f"{action} (dry run)" if query.get("DryRun") == ["true"] else action

    def _forward(self, handler: http.server.BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes, str]:
        skipped = ("host", "content-length", "connection", "accept-encoding")
        headers = {k: v for k, v in handler.headers.items() if k.lower() not in skipped}
        request = urllib.request.Request(
            self.upstream + handler.path, data=body, headers=headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, answer.read(), answer.headers.get("Content-Type", "")
        except urllib.error.HTTPError as error:
            return error.code, error.read(), error.headers.get("Content-Type", "")

    @staticmethod
    def _answer(handler: http.server.BaseHTTPRequestHandler, status: int, body: bytes, kind: str) -> None:
        try:
            handler.send_response(status)
            handler.send_header("Content-Type", kind)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)
        except OSError:
            pass  # the test has killed the client


def dropping(name: str) -> Rewrite:
    """Return a rewrite that removes an XML element, or a member of a JSON object, wherever it is."""
    xml = re.compile(rf"<{name}>.*?</{name}>|<{name} */>".encode(), re.S)
    return _rewrite(
        lambda body: xml.sub(b"", body), lambda found: {k: v for k, v in found.items() if k != name}
    )


def with_value(name: str, value: str) -> Rewrite:
    """Return a rewrite that replaces the text of an XML element, or of a member of a JSON object, wherever it
    is."""
    xml = re.compile(rf"(<{name}>)[^<]*(</{name}>)".encode())
    new = value.encode()
    return _rewrite(
        lambda body: xml.sub(lambda found: found[1] + new + found[2], body),
        lambda found: found | {k: value for k in found if k == name},
    )


def _rewrite(of_xml: Rewrite, of_object: Callable[[dict[str, Any]], Any]) -> Rewrite:
    return lambda body: (
        json.dumps(json.loads(body, object_hook=of_object)).encode()
        if body.startswith(b"{")
        else of_xml(body)
    )


def without_element(name: str) -> Rewrite:
    """Return a rewrite that empties an XML element, for example `vpcSet`."""
    pattern = re.compile(f"<{name}>.*?</{name}>".encode(), re.S)
    return lambda body: pattern.sub(f"<{name}/>".encode(), body)

"""Types and responses of WSGI applications."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]

_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    412: "Precondition Failed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


def respond(start_response: StartResponse, status: int, content_type: str, text: str) -> Iterable[bytes]:
    body = text.encode()
    headers = [("Content-Type", content_type), ("Content-Length", str(len(body)))]
    start_response(f"{status} {_REASONS.get(status, 'Error')}", headers)
    return [body]

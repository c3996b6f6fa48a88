"""Tools for patching moto: one lock, replacing and adding methods, and answering a request with an error."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NoReturn
from xml.sax.saxutils import escape

LOCK = threading.RLock()
"""Held by everything that changes instances: moto is served by many threads and has no locks of its own."""


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute of moto by `make(attribute)`. Raises RuntimeError if moto has none."""
    if not hasattr(owner, name):
        where = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", repr(owner))
        raise RuntimeError(f"this version of moto has no {where}.{name}; the simulator supports moto 5.2")
    setattr(owner, name, make(getattr(owner, name)))


def override(owner: Any, name: str, method: Callable[..., Any]) -> None:
    """Replace a function or method of moto by `method`, which gets the original one before the arguments of
    the call.

    Raises RuntimeError if moto has no such attribute.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return method(original, *args, **kwargs)

        return call

    wrap(owner, name, make)


def add(owner: Any, **methods: Any) -> None:
    """Add missing methods to a class of moto. Raises RuntimeError if a newer moto has one of them."""
    for name, method in methods.items():
        if hasattr(owner, name):
            raise RuntimeError(
                f"this version of moto has {owner.__qualname__}.{name}; remove the simulator's own"
            )
        setattr(owner, name, method)


def backend_data(backend: Any, name: str, make: Callable[[], Any]) -> Any:
    """Return data of one account and region, created by `make` on first use. moto's reset discards it."""
    return backend.__dict__.setdefault(f"_cloudddp_{name}", make())


def client_error(code: str, message: str) -> NoReturn:
    """Answer the request with a client error (HTTP 400)."""
    from moto.ec2.exceptions import EC2ClientError

    raise EC2ClientError(code, message)


def invalid_value(message: str) -> NoReturn:
    client_error("InvalidParameterValue", message)


def invalid_combination(message: str) -> NoReturn:
    client_error("InvalidParameterCombination", message)


def server_error(code: str, message: str) -> NoReturn:
    """Answer the request with a server error (HTTP 500), which clients retry by themselves."""
    from werkzeug.exceptions import HTTPException

    class ServerError(HTTPException):
        code = 500

        def get_headers(self, *_: Any) -> list[tuple[str, str]]:
            return [("Content-Type", "text/xml")]

    raise ServerError(xml_error(code, message))


def result(**members: Any) -> Any:
    """Return moto's answer to a call: the members of the response, by their names in the API."""
    from moto.core.responses import ActionResult

    return ActionResult(members)


def error_response(response: Any, error: Any) -> tuple[int, dict[str, str], Any]:
    """Return the answer to a call of one of moto's EC2 responses that fails with an EC2ClientError before it
    begins.
    """
    from moto.core.responses import ActionResult

    status, headers, body = response.serialized(ActionResult(error))
    return status, {**headers, "status": str(status)}, body


def xml_error(code: str, message: str, request_id: str = "00000000-0000-4000-8000-000000000000") -> str:
    """Return the body of an EC2 error response."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Response><Errors><Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error></Errors>"
        f"<RequestID>{request_id}</RequestID></Response>"
    )

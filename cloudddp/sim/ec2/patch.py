"""How moto is changed: one lock, one way to replace a method, one way to say no.

Knows moto's classes only as things that have attributes, and nothing of EC2's rules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn
from xml.sax.saxutils import escape

LOCK = threading.RLock()
"""Held by everything that changes instances: moto itself is served by many threads and locks nothing."""


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute of moto's by what `make` makes of it. Raises RuntimeError where moto has no such thing."""
    if not hasattr(owner, name):
        where = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", repr(owner))
        raise RuntimeError(f"this moto has no {where}.{name}; the simulator was written for moto 5.2")
    setattr(owner, name, make(getattr(owner, name)))


def add(owner: Any, **methods: Any) -> None:
    """Give moto's class what it lacks. Raises RuntimeError where a newer moto has it already."""
    for name, method in methods.items():
        if hasattr(owner, name):
            raise RuntimeError(f"this moto has {owner.__qualname__}.{name} of its own; leave that to moto")
        setattr(owner, name, method)


def shelf(backend: Any, name: str, make: Callable[[], Any]) -> Any:
    """What a room remembers of one account and region. moto's reset empties it with everything else."""
    return backend.__dict__.setdefault(f"_cloudddp_{name}", make())


def refuse(code: str, message: str) -> NoReturn:
    """Answer the request with an error of the client's (HTTP 400)."""
    from moto.ec2.exceptions import EC2ClientError

    raise EC2ClientError(code, message)


def fail(code: str, message: str) -> NoReturn:
    """Answer the request with an error of AWS's own (HTTP 500), which clients repeat by themselves."""
    from werkzeug.exceptions import HTTPException

    class ServerError(HTTPException):
        code = 500

        def get_headers(self, *_: Any) -> list[tuple[str, str]]:
            return [("Content-Type", "text/xml")]

    raise ServerError(xml_error(code, message))


def xml_error(code: str, message: str, request_id: str = "00000000-0000-4000-8000-000000000000") -> str:
    """An error as EC2 writes it."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Response><Errors><Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error></Errors>"
        f"<RequestID>{request_id}</RequestID></Response>"
    )

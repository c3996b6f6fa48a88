"""Tools for patching moto: one lock, replacing and adding methods, the RunInstances request that is being
served, and answering a request with an error.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn
from xml.sax.saxutils import escape

LOCK = threading.RLock()
"""Held by every call of EC2 (requests.py), and by whatever else changes instances."""
# moto passes only some parameters of RunInstances to the code that creates instances, volumes and interfaces.
_parameters: ContextVar[Mapping[str, Any]] = ContextVar("parameters", default={})  # noqa: B039  never changed


def parameters() -> Mapping[str, Any]:
    """Return the parameters of the RunInstances request that this thread is serving, with the names of the
    API. Empty for other ways to launch (a fleet, a spot request)."""
    return _parameters.get()


@contextlib.contextmanager
def serving(request: Mapping[str, Any]) -> Iterator[None]:
    """Make `parameters` return this request for the length of the block."""
    token = _parameters.set(request)
    try:
        yield
    finally:
        _parameters.reset(token)


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


def xml_error(code: str, message: str) -> str:
    """Return the body of an EC2 error response."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Response><Errors><Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error></Errors>"
        "<RequestID>00000000-0000-4000-8000-000000000000</RequestID></Response>"
    )

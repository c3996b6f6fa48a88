"""The RunInstances request that is being answered on this thread.

moto hands only part of a request on to the places where instances, volumes and interfaces are made; they look here for
the rest. Empty where something else launches (a fleet, a spot request).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

_asked: ContextVar[Mapping[str, Any] | None] = ContextVar("asked", default=None)


def asked() -> Mapping[str, Any]:
    """The request's parameters, named as in the API."""
    return _asked.get() or {}


@contextlib.contextmanager
def answering(parameters: Mapping[str, Any]) -> Iterator[None]:
    """For the length of the block, `asked` gives these parameters."""
    token = _asked.set(parameters)
    try:
        yield
    finally:
        _asked.reset(token)


def is_spot(kwargs: Mapping[str, Any]) -> bool:
    """Whether a launch (moto's arguments of it) is on the spot market."""
    return kwargs.get("lifecycle") == "spot" or kwargs.get("instance_market_options") == "spot"

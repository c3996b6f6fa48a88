"""The RunInstances request that this thread is serving.

moto passes only some of a request's parameters to the code that creates instances, volumes and interfaces;
patches of that code read the others here. Empty for other ways to launch (a fleet, a spot request).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

_parameters: ContextVar[Mapping[str, Any] | None] = ContextVar("parameters", default=None)


def parameters() -> Mapping[str, Any]:
    """Return the request's parameters, with the names of the API."""
    return _parameters.get() or {}


@contextlib.contextmanager
def serving(request: Mapping[str, Any]) -> Iterator[None]:
    """Make `parameters` return this request for the length of the block."""
    token = _parameters.set(request)
    try:
        yield
    finally:
        _parameters.reset(token)


def is_spot(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a launch, given as moto's arguments, is on the spot market."""
    return kwargs.get("lifecycle") == "spot" or kwargs.get("instance_market_options") == "spot"

"""New resources that EC2 has created and does not list by tag yet.

EC2's API is eventually consistent: "the result of an API command you run that affects your Amazon EC2
resources might not be immediately visible to all subsequent commands you run" (EC2 API reference, "Eventual
consistency"). moto lists everything at once. With the condition `unlisted`, Describe calls with a filter by
tag omit the resources of a kind that were tagged less than so many seconds ago; by id, by name, and without a
filter they are found.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from cloudddp.simulator.ec2.catalog import CONDITIONS
from cloudddp.simulator.ec2.patch import backend_data, override

# Method of moto's backend -> kind, as in ResourceType.
_LISTINGS = {
    "describe_addresses": "elastic-ip",
    "describe_security_groups": "security-group",
    "describe_key_pairs": "key-pair",
}
T = TypeVar("T")


def install() -> None:
    """Patch moto's listings, and record when a resource gets its first tag."""
    from moto.ec2.models import EC2Backend

    override(EC2Backend, "create_tags", _recording)
    for method, kind in _LISTINGS.items():
        override(EC2Backend, method, functools.partial(_hiding, kind))
    override(EC2Backend, "describe_instances", _hiding_instances)


def listed(backend: Any, kind: str, filters: Mapping[str, Any] | None, found: list[T]) -> list[T]:
    """Return those of the resources that a listing with these filters shows now."""
    seconds = CONDITIONS.read().unlisted.get(kind, 0.0)
    if not seconds or not any(name.startswith("tag") for name in filters or ()):
        return found
    since = _first_tagged(backend)
    oldest = time.monotonic() - seconds
    return [one for one in found if since.get(one.id, 0.0) <= oldest]  # type: ignore[attr-defined]


def _first_tagged(backend: Any) -> dict[str, float]:
    times: dict[str, float] = backend_data(backend, "first_tagged", dict)
    return times


def _recording(original: Callable[..., Any], self: Any, resource_ids: list[str], tags: Any) -> Any:
    for one in resource_ids:
        _first_tagged(self).setdefault(one, time.monotonic())
    return original(self, resource_ids, tags)


def _hiding(kind: str, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    filters = kwargs.get("filters") or (args[-1] if args and isinstance(args[-1], dict) else None)
    return listed(self, kind, filters, original(self, *args, **kwargs))


def _hiding_instances(original: Callable[..., Any], self: Any, filters: Any = None) -> Any:
    reservations = original(self, filters=filters)  # copies
    for one in reservations:
        one.instances = listed(self, "instance", filters, one.instances)
    return [one for one in reservations if one.instances]

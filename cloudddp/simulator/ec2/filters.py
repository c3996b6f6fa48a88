"""Filters of DescribeInstances that moto lacks, and wildcards in their values.

An unknown filter is answered with EC2's error.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from cloudddp.simulator.ec2.patch import invalid_value, override, wrap

# filter -> attribute path of moto's Instance
_ATTRIBUTES = {
    "client-token": "client_token",
    "placement-group-name": "placement.group_name",
    "instance-lifecycle": "lifecycle",
    "capacity-reservation-id": "capacity_reservation_id",
}


def install() -> None:
    """Extend moto's table of instance filters."""
    from moto.ec2 import utils

    def extend(original: dict[str, str]) -> dict[str, str]:
        return {**original, **_ATTRIBUTES}

    wrap(utils, "filter_dict_attribute_mapping", extend)
    override(utils, "passes_filter_dict", _passes)
    wrap(utils, "instance_value_in_filter_values", lambda _original: _matches)


def _passes(original: Callable[..., bool], instance: Any, filter_dict: dict[str, Any]) -> bool:
    for name, values in filter_dict.items():
        try:
            if not original(instance, {name: values}):
                return False
        except NotImplementedError:  # moto has no such filter
            invalid_value(f"The filter '{name}' is invalid (or unknown to the simulator)")
    return True


def _matches(value: Any, patterns: Any) -> bool:
    """Return whether a value, or any value of a list, matches one of the patterns (`*` and `?`)."""
    values = value if isinstance(value, list) else [value]
    texts = [str(one).lower() if isinstance(one, bool) else str(one) for one in values if one is not None]
    return any(fnmatchcase(text, str(pattern)) for text in texts for pattern in patterns)

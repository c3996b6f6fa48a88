"""The tags of one resource, found where they lie. moto looks through every tag of the account for each resource, with a
pattern for each: an account of some hundred instances then takes seconds to list.
"""

from __future__ import annotations

from typing import Any

from cloudddp.sim.ec2.patch import wrap


def install() -> None:
    from moto.ec2.models.core import TaggedEC2Resource
    from moto.ec2.utils import EC2_PREFIX_TO_RESOURCE, get_prefix

    def get_tags(self: Any) -> list[dict[str, str]]:
        own = self.ec2_backend.tags.get(self.id, {}) if self.id else {}
        kind = EC2_PREFIX_TO_RESOURCE.get(get_prefix(self.id), "") if own else ""
        return [
            {"resource_id": self.id, "key": key, "value": value, "resource_type": kind}
            for key, value in own.items()
        ]

    wrap(TaggedEC2Resource, "get_tags", lambda _: get_tags)

"""Looks up the tags of one resource directly.

For each resource, moto matches every tag of the account against a pattern, so that listing a few hundred instances
takes seconds.
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

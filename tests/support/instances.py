"""Builder of instances as the inventory lists them."""

from __future__ import annotations

from typing import Any

from cloudddp.aws.inventory import Instance
from cloudddp.tags import Tags


def inventory_instance(name: str, tags: Tags, **fields: Any) -> Instance:
    """A running on-demand instance."""
    plain: dict[str, Any] = {
        "state": "running",
        "reason": "",
        "reason_code": "",
        "type": "g5.xlarge",
        "zone": "",
        "spot": False,
        "private_ip": "",
        "public_ip": "",
        "reservation": "r-0",
        "launch_index": 0,
        "client_token": "",
        "launched": None,
        "ended": None,
    }
    return Instance(id=name, tags=tags, **{**plain, **fields})

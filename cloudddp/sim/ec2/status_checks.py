"""The instance status check, by which EC2 sends ARP requests to a node: it fails while the node is frozen or cut off.

Source: EC2 User Guide, "Status checks for Amazon EC2 instances". On AWS it takes some minutes to fail; here it fails at once.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from cloudddp.sim.ec2.patch import wrap


def install() -> None:
    """Patch what DescribeInstanceStatus returns of an instance."""
    from moto.ec2.models.instances import Instance

    wrap(Instance, "instance_status", _checked)


def set_failing(instance: Any, failing: bool) -> None:
    instance.failing_since = datetime.now(UTC) if failing else None


def _checked(original: property) -> property:
    def instance_status(instance: Any) -> Any:
        since = getattr(instance, "failing_since", None)
        if since is None or instance.state != "running":
            return original.__get__(instance)
        detail = {"Name": "reachability", "Status": "failed", "ImpairedSince": since}
        return {"Details": [detail], "Status": "impaired"}

    return property(instance_status)

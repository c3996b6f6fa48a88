"""Security groups: deleting one that is in use, naming one that does not exist.

Rules are checked in security_group_rules.py, and enforced in net/.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from cloudddp.simulator.ec2.patch import client_error, override, wrap


def install() -> None:
    """Patch moto's calls on groups."""
    from moto.ec2.models import EC2Backend
    from moto.ec2.models.elastic_network_interfaces import NetworkInterface

    override(EC2Backend, "delete_security_group", _delete)
    override(EC2Backend, "create_vpc", _allow_group_members)
    override(EC2Backend, "create_network_interface", _check_interface)
    # moto adds the instance's groups to those of every interface, so that none could ever be removed.
    wrap(NetworkInterface, "group_set", lambda _original: property(lambda self: self._group_set))


def check_interfaces(backend: Any, nics: Iterable[dict[str, Any]]) -> None:
    """Fail the request for unknown groups of network interfaces, which moto would create."""
    find(backend, itertools.chain.from_iterable(nic.get("Groups") or [] for nic in nics))


def find(backend: Any, ids: Iterable[str]) -> list[Any]:
    """Return the groups with these ids (not names). Fails the request for an unknown one."""
    found = []
    for group_id in ids:
        group = backend.get_security_group_from_id(group_id)
        if group is None:
            client_error("InvalidGroup.NotFound", f"The security group '{group_id}' does not exist")
        found.append(group)
    return found


def _allow_group_members(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the rule of a VPC's default group that allows its own members, which moto leaves out."""
    from moto.ec2.models.security_groups import SecurityGroupRule

    vpc = original(self, *args, **kwargs)
    group = self.get_default_security_group(vpc.id)
    itself = {"GroupId": group.id, "OwnerId": self.account_id, "UserId": self.account_id}
    group.add_ingress_rule(SecurityGroupRule(self, "-1", group.id, None, None, None, itself, is_egress=False))
    return vpc


def _check_interface(
    original: Callable[..., Any],
    self: Any,
    subnet: Any,
    address: Any,
    others: Any = None,
    group_ids: Any = None,
    *more: Any,
    **kwargs: Any,
) -> Any:
    """Reject groups of another VPC, and unknown ones, which moto would create."""
    subnet = self.get_subnet(subnet) if isinstance(subnet, str) else subnet
    for group in find(self, group_ids or []):
        if group.vpc_id != subnet.vpc_id:
            client_error(
                "InvalidParameter",
                f"Security group {group.id} and subnet {subnet.id} belong to different networks.",
            )
    return original(self, subnet, address, others, group_ids, *more, **kwargs)


def _delete(
    original: Callable[..., Any], self: Any, name: str | None = None, group_id: str | None = None
) -> Any:
    group = self.get_security_group_by_name_or_id(group_id or name)
    if group and (_is_attached(self, group) or _is_referenced(self, group)):
        client_error("DependencyViolation", f"resource {group.id} has a dependent object")
    return original(self, name=name, group_id=group_id)


def _is_attached(backend: Any, group: Any) -> bool:
    by_instances = (i.security_groups for i in backend.all_instances() if i.state != "terminated")
    by_interfaces = (eni._group_set for eni in list(backend.enis.values()))
    return any(group in groups for groups in itertools.chain(by_instances, by_interfaces))


def _is_referenced(backend: Any, group: Any) -> bool:
    others = (g for groups in backend.groups.values() for g in list(groups.values()) if g is not group)
    return any(
        (rule.source_group or {}).get("GroupId") == group.id
        for other in others
        for rule in (*other.ingress_rules, *other.egress_rules)
    )

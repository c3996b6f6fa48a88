"""Security groups that are in use cannot be deleted, unknown ones cannot be used, and changed ones are changed.

Which packets the groups let through is not decided here; what a rule may say is rules.py's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from cloudddp.sim.ec2.patch import LOCK, refuse, wrap


def install() -> None:
    """Guard moto's DeleteSecurityGroup, and keep an instance's groups and its primary interface's the same."""
    from moto.ec2.models import EC2Backend
    from moto.ec2.models.elastic_network_interfaces import NetworkInterface
    from moto.ec2.responses.security_groups import SecurityGroups

    wrap(EC2Backend, "delete_security_group", _guard)
    wrap(SecurityGroups, "delete_security_group", _spare_default)
    wrap(EC2Backend, "create_vpc", _admit_members)
    wrap(EC2Backend, "create_network_interface", _same_vpc)
    wrap(EC2Backend, "modify_instance_security_groups", _change_of_instance)
    wrap(EC2Backend, "modify_network_interface_attribute", _change_of_interface)
    # moto adds the instance's groups to every interface's, so that none can ever be taken away.
    wrap(NetworkInterface, "group_set", lambda _original: property(lambda self: self._group_set))


def check(backend: Any, nics: Iterable[dict[str, Any]]) -> None:
    """Refuse unknown groups of network interfaces, which moto invents."""
    known(backend, itertools.chain.from_iterable(nic.get("Groups") or [] for nic in nics))


def known(backend: Any, ids: Iterable[str]) -> list[Any]:
    """The groups with these ids. Refuses unknown ones; a group's name is no id."""
    found = []
    for group_id in ids:
        group = backend.get_security_group_from_id(group_id)
        if group is None:
            refuse("InvalidGroup.NotFound", f"The security group '{group_id}' does not exist")
        found.append(group)
    return found


def _admit_members(original: Callable[..., Any]) -> Callable[..., Any]:
    """A VPC's default group lets its own members through, which moto leaves out."""

    @functools.wraps(original)
    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        from moto.ec2.models.security_groups import SecurityGroupRule

        vpc = original(self, *args, **kwargs)
        group = self.get_default_security_group(vpc.id)
        itself = {"GroupId": group.id, "OwnerId": self.account_id, "UserId": self.account_id}
        group.add_ingress_rule(
            SecurityGroupRule(self, "-1", group.id, None, None, None, itself, is_egress=False)
        )
        return vpc

    return create


def _same_vpc(original: Callable[..., Any]) -> Callable[..., Any]:
    """A group counts in its own VPC only; moto takes any, and invents those that it does not know."""

    @functools.wraps(original)
    def create(
        self: Any,
        subnet: Any,
        address: Any,
        others: Any = None,
        group_ids: Any = None,
        *more: Any,
        **kwargs: Any,
    ) -> Any:
        subnet = self.get_subnet(subnet) if isinstance(subnet, str) else subnet
        _check_vpc(subnet, known(self, group_ids or []))
        return original(self, subnet, address, others, group_ids, *more, **kwargs)

    return create


def _check_vpc(subnet: Any, groups: Iterable[Any]) -> None:
    for group in groups:
        if group.vpc_id != subnet.vpc_id:
            refuse(
                "InvalidParameter",
                f"Security group {group.id} and subnet {subnet.id} belong to different networks.",
            )


def _change_of_instance(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def modify(self: Any, instance_id: str, new_group_id_list: list[str]) -> Any:
        with LOCK:
            instance, groups = self.get_instance(instance_id), known(self, new_group_id_list)
            if len(instance.nics) > 1:
                refuse(
                    "InvalidInstanceID",
                    f"There are multiple interfaces attached to instance '{instance_id}'. "
                    "Please specify an interface ID for the operation instead.",
                )
            _check_vpc(instance.nics[0].subnet, groups)
            instance.nics[0]._group_set = groups
            return original(self, instance_id, new_group_id_list)

    return modify


def _change_of_interface(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def modify(self: Any, eni_id: str, group_ids: list[str], *args: Any, **kwargs: Any) -> None:
        with LOCK:
            interface, groups = self.get_network_interface(eni_id), known(self, group_ids)
            _check_vpc(interface.subnet, groups)
            original(self, eni_id, group_ids, *args, **kwargs)
            instance = interface.instance
            if groups and instance is not None and instance.nics.get(0) is interface:
                instance.security_groups = list(groups)

    return modify


def _guard(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def delete(self: Any, name: str | None = None, group_id: str | None = None) -> Any:
        with LOCK:
            group = self.get_security_group_from_id(group_id) if group_id else None
            if name and not group_id:
                group = self.get_security_group_from_name(name)
            if group:
                _check_unused(self, group, by_name=not group_id)
            return original(self, name=name, group_id=group_id)

    return delete


def _spare_default(original: Callable[..., Any]) -> Callable[..., Any]:
    """A user cannot delete a default group; it goes with its VPC."""

    @functools.wraps(original)
    def delete(self: Any) -> Any:
        from moto.core.responses import ActionResult

        name, group_id = self._get_param("GroupName"), self._get_param("GroupId")
        group = self.ec2_backend.get_security_group_from_id(group_id) if group_id else None
        if name == "default" or (group and group.name == "default"):
            refuse(
                "CannotDelete",
                f'the specified group: "{group_id or name}" name: "default" cannot be deleted by a user',
            )
        if group is None and name:
            group = self.ec2_backend.get_security_group_from_name(name)
        original(self)
        return ActionResult({"Return": True, "GroupId": group.id if group else group_id})

    return delete


def _check_unused(backend: Any, group: Any, *, by_name: bool) -> None:
    if not _held(backend, group) and not _referenced(backend, group):
        return
    if by_name:  # the old way, which knows groups of the default VPC only, and has an error of its own
        refuse("InvalidGroup.InUse", f"There are active resources using the group '{group.name}'")
    refuse("DependencyViolation", f"resource {group.id} has a dependent object")


def _held(backend: Any, group: Any) -> bool:
    by_instances = (i.security_groups for i in backend.all_instances() if i.state != "terminated")
    by_interfaces = (eni._group_set for eni in list(backend.enis.values()))
    return any(group in groups for groups in itertools.chain(by_instances, by_interfaces))


def _referenced(backend: Any, group: Any) -> bool:
    others = (g for groups in backend.groups.values() for g in list(groups.values()) if g is not group)
    return any(
        (rule.source_group or {}).get("GroupId") == group.id
        for other in others
        for rule in (*other.ingress_rules, *other.egress_rules)
    )

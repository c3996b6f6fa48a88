"""Placement groups: the actions that moto lacks, and the constraints on a launch into a group.

A cluster group is confined to one zone, and to instance types that support it. Network distance is not
simulated.
"""

from __future__ import annotations

from typing import Any

from cloudddp.simulator.ec2 import catalog, late_listing
from cloudddp.simulator.ec2.patch import (
    add,
    backend_data,
    client_error,
    invalid_combination,
    invalid_value,
    result,
)

_STRATEGIES = ("cluster", "partition", "spread")
_MAX_GROUPS = 500  # per account and region


def install() -> None:
    """Add the actions to moto's EC2."""
    from moto.ec2.responses import EC2Response

    add(
        EC2Response,
        create_placement_group=_create,
        describe_placement_groups=_describe,
        delete_placement_group=_delete,
    )


def check(
    backend: Any, request: dict[str, Any], *, instance_type: str, zone: str, spot: dict[str, Any]
) -> Any:
    """Return the group that a launch's Placement names, or None. Fails the request if the group does not
    allow it."""
    name = request.get("GroupName") or request.get("GroupId")
    if not name:
        return None
    group = _find(backend, name)
    if group is None:
        client_error("InvalidPlacementGroup.Unknown", f"The placement group '{name}' is unknown.")
    if group.strategy not in catalog.strategies(instance_type):
        invalid_combination(
            f"{group.strategy.capitalize()} placement groups are not supported by the '{instance_type}' "
            "instance type. Specify a supported instance type or change the placement group strategy, and "
            "try again."
        )
    if group.strategy == "cluster":
        _check_cluster(backend, group, zone, spot)
    return group


def _check_cluster(backend: Any, group: Any, zone: str, spot: dict[str, Any]) -> None:
    if spot.get("InstanceInterruptionBehavior") in ("stop", "hibernate"):
        invalid_combination(
            "A Spot Instance that is stopped or hibernated on interruption cannot be launched in a cluster "
            "placement group."
        )
    zones = {instance.placement.zone for instance in _members(backend, group)}
    if zones - {zone}:
        invalid_combination(
            f"The cluster placement group '{group.group_name}' has instances in {', '.join(sorted(zones))}; "
            f"it cannot span Availability Zones, and {zone} was requested."
        )


def join(instance: Any, group: Any) -> None:
    """Show the instance as a member of the group."""
    instance.placement.group_name = group.group_name
    instance.placement.group_id = group.group_id


def _known(backend: Any) -> dict[str, Any]:
    groups: dict[str, Any] = backend_data(backend, "placement_groups", dict)
    return groups


def _find(backend: Any, name: str) -> Any:
    known = _known(backend)
    return known.get(name) or next((group for group in known.values() if group.group_id == name), None)


def _members(backend: Any, group: Any) -> list[Any]:
    return [
        instance
        for instance in backend.all_instances()
        if instance.placement.group_name == group.group_name and instance.state != "terminated"
    ]


def _create(response: Any) -> Any:
    name = response._get_param("GroupName")
    strategy = response._get_param("Strategy", "cluster")
    tags = response._parse_tag_specification("placement-group").get("placement-group", {})
    if not name:
        client_error("MissingParameter", "The request must contain the parameter groupName")
    if strategy not in _STRATEGIES:
        invalid_value(f"Value ({strategy}) for parameter strategy is invalid.")
    response.error_on_dryrun()
    known = _known(response.ec2_backend)
    if name in known:
        client_error("InvalidPlacementGroup.Duplicate", f"The placement group '{name}' already exists.")
    if len(known) >= _MAX_GROUPS:
        client_error(
            "PlacementGroupLimitExceeded", "The maximum number of placement groups has been reached."
        )
    known[name] = group = _new_group(response.ec2_backend, name, strategy)
    group.add_tags(tags)
    return result(PlacementGroup=group)


def _new_group(backend: Any, name: str, strategy: str) -> Any:
    from moto.ec2.models.core import TaggedEC2Resource
    from moto.ec2.utils import random_id

    class PlacementGroup(TaggedEC2Resource):
        """As DescribePlacementGroups shows it; filters refer to the attributes."""

        def __init__(self) -> None:
            self.ec2_backend = backend
            self.id = self.group_id = random_id(prefix="pg")
            self.group_name, self.strategy, self.state = name, strategy, "available"
            self.group_arn = f"arn:aws:ec2:{backend.region_name}:{backend.account_id}:placement-group/{name}"

    return PlacementGroup()


def _describe(response: Any) -> Any:
    from moto.ec2.utils import generic_filter

    response.error_on_dryrun()
    names = response._get_param("GroupNames", []) + response._get_param("GroupIds", [])
    for name in names:
        if _find(response.ec2_backend, name) is None:
            client_error("InvalidPlacementGroup.Unknown", f"The placement group '{name}' is unknown.")
    groups = [
        group
        for group in _known(response.ec2_backend).values()
        if not names or {group.group_name, group.group_id} & set(names)
    ]
    filters = response._filters_from_querystring()
    shown = late_listing.listed(
        response.ec2_backend, "placement-group", filters, generic_filter(filters, groups)
    )
    return result(PlacementGroups=shown)


def _delete(response: Any) -> Any:
    from moto.core.responses import EmptyResult

    name = response._get_param("GroupName")
    response.error_on_dryrun()
    group = _find(response.ec2_backend, name)
    if group is None:
        client_error("InvalidPlacementGroup.Unknown", f"The placement group '{name}' is unknown.")
    if _members(response.ec2_backend, group):
        client_error(
            "InvalidPlacementGroup.InUse",
            f"The placement group '{group.group_name}' is in use and may not be deleted.",
        )
    del _known(response.ec2_backend)[group.group_name]
    response.ec2_backend.tags.pop(group.id, None)
    return EmptyResult()

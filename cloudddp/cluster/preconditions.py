"""What is wrong with the settings of a cluster as far as that can be told without a call. Calls nothing."""

from __future__ import annotations

from collections.abc import Sequence

from cloudddp.aws import instance_types
from cloudddp.aws.client import AWS
from cloudddp.cluster import capacity_reservation, interfaces, ssh_routes
from cloudddp.cluster.permission import require_key_region
from cloudddp.config.spec import ClusterSpec


def check(clouds: Sequence[AWS], spec: ClusterSpec) -> None:
    """Raise UsageError for an unknown instance type, and for settings that exclude each other. `clouds`: the regions."""
    ssh_routes.check_settings(spec)
    instance_types.require_known_type(clouds[0], spec.instance_type)
    capacity_reservation.check_settings(spec)
    interfaces.check_settings(spec)
    for aws in clouds:
        require_key_region(spec, aws.region)

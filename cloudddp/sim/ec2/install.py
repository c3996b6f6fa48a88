"""Patches moto with all modules of this package."""

from __future__ import annotations

from types import ModuleType

from cloudddp.sim.ec2 import (
    filters,
    gateways,
    images,
    instance_status,
    interfaces,
    ip_addresses,
    key_pairs,
    late_listing,
    placement,
    prices,
    public_access,
    quotas,
    regions,
    reservations,
    role_sessions,
    run_instances,
    security_group_rules,
    security_groups,
    speed,
    spot,
    stop_start,
    tags,
    termination,
    volumes,
    xml_characters,
)
from cloudddp.sim.ec2.patch import wrap

# The order matters where two modules wrap the same method: the later one is the outer one.
_MODULES: tuple[ModuleType, ...] = (
    *(quotas, regions, images, volumes, ip_addresses, gateways, public_access, interfaces),
    *(security_groups, key_pairs, security_group_rules, placement, spot, reservations, filters),
    *(run_instances, instance_status, stop_start, termination, xml_characters, tags, late_listing),
    *(role_sessions, prices, speed),
)
_VALIDATIONS = (
    "ENABLE_AMI_VALIDATION",
    "EC2_ENABLE_INSTANCE_TYPE_VALIDATION",
    "ENABLE_KEYPAIR_VALIDATION",
)

_installed = False


def install() -> None:
    """Patch moto, once per process and before any of its backends exists.

    Raises RuntimeError if the installed moto lacks something that is patched.
    """
    global _installed
    if _installed:
        return
    from moto import settings

    for name in _VALIDATIONS:
        wrap(settings, name, lambda _original: True)
    for module in _MODULES:
        module.install()
    _installed = True

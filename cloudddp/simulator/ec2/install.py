"""Patches moto with all modules of this package."""

from __future__ import annotations

from importlib import import_module

from cloudddp.simulator.ec2.patch import wrap

# The order matters where two modules wrap the same method: the later one is the outer one.
_MODULES = """
    capacity regions images volumes ip_addresses gateways public_access interfaces
    security_groups key_pairs security_group_rules placement spot reservations filters
    run_instances instance_status instance_states requests late_listing
    role_sessions prices offerings speed
""".split()
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
        import_module(f"{__package__}.{module}").install()
    _installed = True

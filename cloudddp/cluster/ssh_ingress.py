"""Which addresses the security group of a cluster opens SSH to: `cloudddp allow-me`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.cluster import lookup
from cloudddp.cluster.connect import remembered, ssh_sources
from cloudddp.cluster.lookup import Ownership
from cloudddp.cluster.plan import CALLER_RULE, ssh_rule
from cloudddp.config.cluster_spec import Access, ClusterSpec, connection_mode
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.local_state import ClusterFolder


def _current_source(aws: AWS, spec: Access) -> str:
    """Return the block that `allow-me` admits, this computer's or the jump host's. Raises UsageError."""
    if spec.proxy_command is not None:
        raise UsageError(
            "allow-me has nothing to allow: SSH goes through cluster.proxy_command, and not from this "
            "computer's address",
            hint="Session Manager needs no rule; for another proxy, set ssh_from before `cloudddp up`",
        )
    if connection_mode(spec) == "private":
        raise UsageError(
            'allow-me does not apply to connect = "private": the nodes see the address that your VPN gives '
            "you, and not this computer's public one",
            hint="the security group admits the ssh_from of its `cloudddp up`",
        )
    without = replace(spec, ssh_from=())
    return ssh_sources(aws, without)[0]


def allow_caller(aws: AWS, spec: ClusterSpec, ownership: Ownership) -> str:
    """Open SSH to the current address of this computer, or of the jump host, and close it to earlier ones.

    Returns the address block. Raises UsageError if the route to the nodes has no such address.
    """
    groups = _own_groups(aws, spec.name, ownership)
    ids = {inventory.resource(aws, "security group", group).tags.cluster_id for group in groups} - {""}
    record = ClusterFolder(ids.pop()).record() if len(ids) == 1 else None
    block = _current_source(aws, remembered(spec, record))
    for group in groups:
        blocks = inventory.ingress_blocks(group, spec.ssh_port)
        if block not in blocks:  # the new one first, so that SSH is never closed in between
            new = [ssh_rule(block, spec.ssh_port, CALLER_RULE)]
            aws.call("ec2", "authorize_security_group_ingress", GroupId=group["GroupId"], IpPermissions=new)
        old = [one for one, rule in blocks.items() if one != block and rule == CALLER_RULE]
        if old:
            rules = [ssh_rule(one, spec.ssh_port, CALLER_RULE) for one in old]
            aws.call("ec2", "revoke_security_group_ingress", GroupId=group["GroupId"], IpPermissions=rules)
    return block


def _own_groups(aws: AWS, name: str, ownership: Ownership) -> list[dict[str, Any]]:
    """Return the caller's security groups of clusters of that name. Raises CloudDDPError without any."""
    found = inventory.security_groups(aws, inventory.named(name))
    if not found:
        raise lookup.NoCluster(
            f"there is no cluster {name!r} in {aws.region}", hint="create one: `cloudddp up`"
        )
    described = [(group, inventory.resource(aws, "security group", group)) for group in found]
    own = [group for group, resource in described if ownership.mine(resource)]
    if not own:
        owners = sorted({resource.tags.owner or "an unknown owner" for _, resource in described})
        raise CloudDDPError(
            f"cluster {name!r} in {aws.region} is not yours: its security group belongs to "
            f"{', '.join(owners)}; {ownership.caller}",
            hint="add --anyone to act on it anyway, or choose another name with -c",
        )
    return own

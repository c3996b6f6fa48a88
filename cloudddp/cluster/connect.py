"""Connects this computer to the nodes of a cluster: by which route, from which addresses (the security group
admits no others), and what the agent of each node reports first."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace

from cloudddp import timings
from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.machine import BootStage, ProbeReply, ProbeRequest
from cloudddp.aws.caller import caller_block, jump_host_address
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance
from cloudddp.cluster import host_keys, ssh_hosts
from cloudddp.cluster.model import Cluster
from cloudddp.config import settings, timing
from cloudddp.config.checks import expand_proxy_command
from cloudddp.config.cluster_spec import Access, ClusterSpec, connection_mode
from cloudddp.config.settings import Layer
from cloudddp.errors import (
    CloudDDPError,
    ConnectError,
    NodeError,
    ProgressCallback,
    UsageError,
    ignore_progress,
)
from cloudddp.local_state import USUAL_USER, ClusterFolder, ClusterRecord
from cloudddp.ssh.fleet import Fleet, Outcome
from cloudddp.ssh.routes.command import ProxyCommand
from cloudddp.ssh.routes.jump import Jump
from cloudddp.ssh.target import Direct, Route, Target

PROJECT = "project"  # the folder with the user's files, in a node's home
_PROBE_SECONDS = 60.0  # for everything but the boot and the GPUs
_PLAIN = re.compile(r"[A-Za-z0-9_./~+-]+(?=\s|$)")
_VPN_HINT = (
    "is the VPN up, does it route the nodes' subnet, and is your address in it, as the nodes see it, "
    "one of ssh_from?"
)


def remembered(spec: ClusterSpec, record: ClusterRecord | None) -> ClusterSpec:
    """Return the settings, with the route to the nodes that `up` recorded if they name none. Raises
    UsageError."""
    if record is None or (spec.connect, spec.proxy_jump, spec.proxy_command) != (None, None, None):
        return spec
    kept = {"connect": record.connect, "proxy_jump": record.proxy_jump, "proxy_command": record.proxy_command}
    route = {"cluster": {key: value for key, value in kept.items() if value}}
    found = settings.resolve([Layer("the record of the cluster", route)]).cluster
    return replace(
        spec, connect=found.connect, proxy_jump=found.proxy_jump, proxy_command=found.proxy_command
    )


def _address(spec: Access, rank: int, instance: Instance) -> str:
    """Return the address at which a node answers. Raises CloudDDPError if it has none of the kind."""
    if connection_mode(spec) != "public":
        return instance.private_ip
    if not instance.public_ip:
        raise CloudDDPError(
            f"node {rank} ({instance.id}) has no public address",
            hint="the cluster was created for another route: set `connect`, `proxy_jump` or "
            "`proxy_command` as in its configuration (cloudddp.toml, or CLOUDDDP_CONNECT and so on)",
        )
    return instance.public_ip


def _proxy_command(spec: Access, region: str, user: str, rank: int, instance: Instance) -> ProxyCommand:
    """Return the route to a node by cluster.proxy_command."""
    values = {
        "%h": instance.id,
        "%n": instance.id,
        "%a": _address(spec, rank, instance),
        "%p": str(spec.ssh_port),
        "%r": user,
    }
    try:
        command = expand_proxy_command(spec.proxy_command or "", values)
    except ValueError as error:
        raise CloudDDPError(f"node {rank}: {error}") from None
    # Programs such as the AWS CLI look for the node in the region that they are configured for.
    variables = {"AWS_REGION": region, "AWS_DEFAULT_REGION": region}
    if "AWS_PROFILE" in os.environ:  # the hosts of OpenSSH need it
        variables["AWS_PROFILE"] = os.environ["AWS_PROFILE"]
    return ProxyCommand(command, variables)


def check_route_settings(spec: Access) -> None:
    """Raise UsageError for settings with which nodes would be unreachable. Calls nothing."""
    if connection_mode(spec) == "private" and spec.proxy_command is None and not spec.ssh_from:
        raise UsageError(
            'cluster.connect is "private", and cluster.ssh_from is not set: cloudddp cannot find out which '
            "address the nodes see behind your VPN",
            hint="give it: --ssh-from 10.8.0.10/32 if the VPN routes your own address, or the block of the "
            "VPC or VPN if it translates addresses, as AWS Client VPN does",
        )


def check_route(spec: Access) -> None:
    """Log in to the jump host, or look for the proxy command's program, before anything is created.

    Raises UsageError for what only the user can change; ConnectError if the jump host does not answer.
    """
    if spec.proxy_command is not None:
        # The programs that it starts, as far as that is plain to see.
        first = _PLAIN.match(spec.proxy_command.lstrip())
        needed = {first[0]: "install it, or give its path"} if first else {}
        if "aws ssm start-session" in spec.proxy_command:  # also in `sh -c "..."`, as AWS documents it
            needed["session-manager-plugin"] = (
                "install the Session Manager plugin of the AWS CLI, from AWS's documentation of Systems "
                "Manager"
            )
        for program, hint in needed.items():
            if shutil.which(program) is None:
                raise UsageError(f"cluster.proxy_command: {program} is not installed", hint=hint)
    if spec.proxy_jump is not None:
        try:
            Jump(spec.proxy_jump).check(timing.current().connect)
        except ConnectError as error:
            if error.patience:
                raise
            raise UsageError(error.message, hint=error.hint) from None


def ssh_sources(
    aws: AWS,
    spec: Access,
    caller: Callable[[], str] = caller_block,
    jump_address: Callable[[AWS, str], str | None] = jump_host_address,
) -> tuple[str, ...]:
    """Return the address blocks that the security group admits to SSH: `ssh_from`, or as few as the route
    needs.

    By public address: this computer's. Through a jump host: its private address. With a proxy command none:
    the agent of Session Manager connects on the node itself. Raises UsageError, CloudDDPError.
    """
    check_route_settings(spec)
    if spec.ssh_from:
        return spec.ssh_from
    if spec.proxy_command is not None:
        return ()
    if spec.proxy_jump is None:
        return (caller(),)
    host = Jump(spec.proxy_jump).host
    address = jump_address(aws, host.host)
    if address is None:
        raise UsageError(
            f"{host.where}: no EC2 instance in {aws.region} has this address, so its private address is "
            "unknown",
            hint="give the address under which the nodes see it: --ssh-from 10.0.0.10/32 (or ssh_from in "
            "cloudddp.toml)",
        )
    return (f"{address}/32",)


def is_direct(spec: Access) -> bool:
    """Return whether SSH goes from this computer to the nodes' public addresses."""
    return connection_mode(spec) == "public" and spec.proxy_command is None


def targets(cluster: Cluster, spec: ClusterSpec) -> tuple[dict[int, Target], dict[int, Exception]]:
    """Return where each node answers SSH, by node rank, and why others cannot: EC2 says that they do not run.
    Raises CloudDDPError if this computer has no key."""
    folder = ClusterFolder(cluster.id)
    private_key = folder.login_key()
    known = host_keys.read(folder)
    record = folder.record()
    user = spec.user or (record.user if record else USUAL_USER)
    spec = remembered(spec, record)
    route: Route = Direct(_VPN_HINT if connection_mode(spec) == "private" else "")
    if spec.proxy_jump is not None:
        route = Jump(spec.proxy_jump)  # for all nodes: it asks ssh once
    found: dict[int, Target] = {}
    lost: dict[int, Exception] = {}
    for rank, instance in cluster.nodes.items():
        try:
            cluster.require_running(rank)
            if spec.proxy_command is not None:
                route = _proxy_command(spec, cluster.region, user, rank, instance)
            found[rank] = Target(
                label=f"node {rank} ({instance.id})",
                host=_address(spec, rank, instance),
                port=spec.ssh_port,
                user=user,
                private_key=private_key,
                host_keys=known.accepted(instance.id),
                id=instance.id,
                route=route,
            )
        except CloudDDPError as error:
            lost[rank] = error
    return found, lost


# Called several times a second while nodes boot; may raise to end the wait.
Meanwhile = Callable[[Fleet], None]
Dial = Callable[[Cluster, ClusterSpec, float, Meanwhile], Runner]


def dial(cluster: Cluster, spec: ClusterSpec, within: float, meanwhile: Meanwhile) -> Fleet:
    """Return open SSH connections to every node, which may still share the host key of their user data."""
    return _dial(cluster, spec, within, meanwhile, partly=False)[0]


@dataclass(frozen=True, slots=True)
class Reach:
    """How `up` reaches the nodes: a dry run has none."""

    dial: Dial = dial
    check_route: Callable[[ClusterSpec], None] = check_route
    ssh_sources: Callable[[AWS, ClusterSpec], tuple[str, ...]] = ssh_sources


OVER_SSH: Reach = Reach()


def _dial(
    cluster: Cluster, spec: ClusterSpec, within: float, meanwhile: Meanwhile, *, partly: bool
) -> tuple[Fleet, dict[int, Exception]]:
    found, lost = targets(cluster, spec)
    if lost and not (partly and found):
        Outcome(errors=lost).all()
    fleet = Fleet(found)
    try:
        lost |= fleet.connect(within=within, meanwhile=lambda: meanwhile(fleet), partly=partly)
    except BaseException:
        fleet.close()
        raise
    return fleet, lost


@timings.span("connections")
def connect(
    cluster: Cluster,
    spec: ClusterSpec,
    within: float = 0.0,
    meanwhile: Meanwhile = lambda _: None,
    *,
    progress: ProgressCallback = ignore_progress,
    dial: Dial = dial,
) -> Runner:
    """Return open SSH connections to every node, retrying for `within` seconds while nodes boot.

    Afterwards each node has a host key of its own: an interrupted replacement is completed first.
    """
    return _with_own_keys(
        cluster, spec, lambda: (dial(cluster, spec, within, meanwhile), {}), progress, partly=False
    )[0]


@timings.span("connections")
def connect_reachable(
    cluster: Cluster, spec: ClusterSpec, *, progress: ProgressCallback = ignore_progress
) -> tuple[Runner, dict[int, Exception]]:
    """Connect as `connect` to the nodes that answer, and return why others do not. Raises if none does."""
    return _with_own_keys(
        cluster, spec, lambda: _dial(cluster, spec, 0.0, lambda _: None, partly=True), progress, partly=True
    )


def _with_own_keys(
    cluster: Cluster,
    spec: ClusterSpec,
    dialled: Callable[[], tuple[Runner, dict[int, Exception]]],
    progress: ProgressCallback,
    *,
    partly: bool,
) -> tuple[Runner, dict[int, Exception]]:
    """Connect, and give each node a host key of its own."""
    folder, instances = _key_owners(cluster)
    with host_keys.exclusive(folder, instances, progress):
        runner, lost = dialled()
        try:
            whole = not cluster.missing
            failed = host_keys.replace_shared_key(
                runner, folder, instances, whole=whole, partly=partly, progress=progress
            )
            runner.leave_out(failed)
            if failed and not tuple(runner.nodes):
                Outcome(errors=failed).all()
        except BaseException:
            runner.close()
            raise
    ssh_hosts.update(cluster, targets(cluster, spec)[0], progress)
    return runner, {**lost, **failed}


def complete_host_keys(cluster: Cluster, spec: ClusterSpec, *, progress: ProgressCallback) -> None:
    """Complete an interrupted replacement of host keys, for `cloudddp ssh`, which connects by itself."""
    if host_keys.incomplete(*_key_owners(cluster)):
        connect_reachable(cluster, spec, progress=progress)[0].close()


def _key_owners(cluster: Cluster) -> tuple[ClusterFolder, dict[int, str]]:
    folder = ClusterFolder(cluster.id)
    folder.login_key()
    return folder, {rank: instance.id for rank, instance in cluster.nodes.items()}


def probe(
    runner: Runner,
    cluster: Cluster,
    request: ProbeRequest,
    *,
    on_stage: Callable[[int, BootStage], None] | None = None,
) -> dict[int, ProbeReply]:
    """Return each node's reply to `request`, which lacks the node's address. Raises NodeError if no interface
    has it. `on_stage` is called as nodes get further."""
    replies = client.call_all(
        runner,
        {node: replace(request, private_ip=cluster.nodes[node].private_ip) for node in runner.nodes},
        # GPUs have gpu_seconds to be listed, and again to be usable.
        timeout=_PROBE_SECONDS + request.boot_seconds + 2 * request.gpu_seconds + request.torch_seconds,
        on_stderr=None if on_stage is None else _stages(on_stage),
    )
    for rank, reply in replies.items():
        if not reply.interface:
            node = cluster.nodes[rank]
            raise NodeError(
                f"node {rank} ({node.id}): no interface has its private address {node.private_ip}"
            )
    return replies


def _stages(on_stage: Callable[[int, BootStage], None]) -> Callable[[int, bytes], None]:
    """Return a callback that takes the agents' stderr. A stage that arrives in two parts is not shown."""

    def receive(node: int, data: bytes) -> None:
        for stage in BootStage:
            if stage.line in data:
                on_stage(node, stage)

    return receive

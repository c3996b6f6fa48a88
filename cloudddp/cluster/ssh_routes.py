"""How this computer reaches the nodes: the route of their SSH connections, and whom their security group
admits."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Iterator

import msgspec

from cloudddp.aws.caller import caller_block
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance
from cloudddp.aws.jump_hosts import private_address
from cloudddp.config import connection, settings, timing
from cloudddp.config.settings import Layer
from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import CloudDDPError, ConnectError, UsageError
from cloudddp.local_state import ClusterRecord
from cloudddp.ssh.routes.command import ProxyCommand
from cloudddp.ssh.routes.jump import Jump
from cloudddp.ssh.target import Direct, Route

_SHELLS = ("sh", "bash", "dash", "zsh")
_PLAIN = re.compile(r"[A-Za-z0-9_./~+-]+")
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
    layer = Layer(
        "the record of the cluster", {"cluster": {key: value for key, value in kept.items() if value}}
    )
    found = settings.resolve([layer]).cluster
    return msgspec.structs.replace(
        spec, connect=found.connect, proxy_jump=found.proxy_jump, proxy_command=found.proxy_command
    )


class SSHRoutes:
    """The routes to the nodes of one cluster."""

    def __init__(self, spec: ClusterSpec, region: str, user: str) -> None:
        self._spec = spec
        self._region = region
        self._user = user
        self._mode = connection.mode(spec)
        self._shared: Route = (
            Jump(spec.proxy_jump) if spec.proxy_jump else Direct(_VPN_HINT if self._mode == "private" else "")
        )

    def address(self, rank: int, instance: Instance) -> str:
        """Return the address at which a node answers. Raises CloudDDPError if it has none of the kind."""
        if self._mode == "public" and not instance.public_ip:
            raise CloudDDPError(
                f"node {rank} ({instance.id}) has no public address",
                hint="the cluster was created for another route: set `connect`, `proxy_jump` or "
                "`proxy_command` as in its configuration (cloudddp.toml, or CLOUDDDP_CONNECT and so on)",
            )
        return instance.public_ip if self._mode == "public" else instance.private_ip

    def route(self, rank: int, instance: Instance) -> Route:
        """Return the route to a node."""
        if self._spec.proxy_command is None:
            return self._shared
        values = {
            "%h": instance.id,
            "%n": instance.id,
            "%a": self.address(rank, instance),
            "%p": str(self._spec.ssh_port),
            "%r": self._user,
        }
        try:
            command = connection.expand(self._spec.proxy_command, values)
        except ValueError as error:
            raise CloudDDPError(f"node {rank}: {error}") from None
        # Programs such as the AWS CLI look for the node in the region that they are configured for.
        return ProxyCommand(command, {"AWS_REGION": self._region, "AWS_DEFAULT_REGION": self._region})


def check_settings(spec: ClusterSpec) -> None:
    """Raise UsageError for settings with which nodes would be unreachable. Calls nothing."""
    if connection.mode(spec) == "private" and spec.proxy_command is None and not spec.ssh_from:
        raise UsageError(
            'cluster.connect is "private", and cluster.ssh_from is not set: cloudddp cannot find out which '
            "address the nodes see behind your VPN",
            hint="give it: --ssh-from 10.8.0.10/32 if the VPN routes your own address, or the block of the "
            "VPC or VPN if it translates addresses, as AWS Client VPN does",
        )


def check_route(spec: ClusterSpec) -> None:
    """Log in to the jump host, or look for the proxy command's program, before anything is created.

    Raises UsageError for what only the user can change; ConnectError if the jump host does not answer.
    """
    if spec.proxy_command is not None:
        for program in _programs(spec.proxy_command):
            if shutil.which(program) is None:
                raise UsageError(f"cluster.proxy_command: {program} is not installed", hint=_install(program))
    if spec.proxy_jump is not None:
        try:
            Jump(spec.proxy_jump).check(timing.current().connect)
        except ConnectError as error:
            if error.patience:
                raise
            raise UsageError(error.message, hint=error.hint) from None


def _programs(command: str) -> Iterator[str]:
    """Yield the programs that a proxy command starts, as far as that is plain to see."""
    try:
        words = shlex.split(command)
    except ValueError:  # the shell will explain it
        return
    if words and _PLAIN.fullmatch(words[0]):
        yield words[0]
        if words[0].rpartition("/")[2] in _SHELLS and words[1:2] == ["-c"] and len(words) > 2:
            yield from _programs(words[2])
    if words[:3] == ["aws", "ssm", "start-session"]:
        yield "session-manager-plugin"


def _install(program: str) -> str:
    if program == "session-manager-plugin":
        return (
            "install the Session Manager plugin of the AWS CLI, from AWS's documentation of Systems Manager"
        )
    return "install it, or give its path"


def ssh_sources(
    aws: AWS,
    spec: ClusterSpec,
    caller: Callable[[], str] = caller_block,
    jump_address: Callable[[AWS, str], str | None] = private_address,
) -> tuple[str, ...]:
    """Return the address blocks that the security group admits to SSH: `ssh_from`, or as few as the route
    needs.

    By public address: this computer's. Through a jump host: its private address. With a proxy command none:
    the agent of Session Manager connects on the node itself. Raises UsageError, CloudDDPError if there is no
    answer.
    """
    check_settings(spec)
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


def public_sources(spec: ClusterSpec, ssh_from: tuple[str, ...]) -> tuple[str, ...]:
    """Return the blocks from which SSH comes to public addresses, which need a route back through an internet
    gateway."""
    return ssh_from if is_direct(spec) else ()


def is_direct(spec: ClusterSpec) -> bool:
    """Return whether SSH goes from this computer to the nodes' public addresses."""
    return connection.mode(spec) == "public" and spec.proxy_command is None

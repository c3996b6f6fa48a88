"""What types do not express of the values of three settings. Each check raises UsageError; `origin` is the
source of the value."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence

from cloudddp.errors import UsageError

_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Set for each rank by the launcher or torchrun: a value set by the user would silently be ignored.
RESERVED_ENVIRONMENT = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
)
# Options of torchrun that cloudddp sets, or that take the place of the script.
OF_TORCHRUN = """
    nnodes nproc-per-node max-restarts local-addr rdzv-backend rdzv-endpoint rdzv-id rdzv-conf
    standalone node-rank master-addr master-port no-python module run-path help
""".split()


def ssh_from(origin: str, blocks: Sequence[str]) -> None:
    for block in blocks:
        try:
            ipaddress.ip_network(block)
        except ValueError as error:
            raise UsageError(
                f"{origin}: cluster.ssh_from: {error}",
                hint="allowed: a CIDR block such as 203.0.113.7/32",
            ) from None


def torchrun(origin: str, options: Iterable[str]) -> None:
    for option in options:
        name = option.partition("=")[0].lstrip("-").replace("_", "-")
        if not option.startswith("-") or not name:
            raise UsageError(
                f"{origin}: job.torchrun_args has {option!r}, which is not an option",
                hint='give each option with its value as one item: ["--numa-binding=node"]',
            )
        # torchrun takes the beginning of a name, too.
        if option[:2] in ("-m", "-h") or (
            option[:2] == "--" and any(own.startswith(name) for own in OF_TORCHRUN)
        ):
            raise UsageError(
                f"{origin}: job.torchrun_args has {option}, which cloudddp sets itself",
                hint="remove it; use nproc_per_node, rendezvous, master_port and max_restarts instead",
            )


def environment(origin: str, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        if not _ENVIRONMENT_NAME.fullmatch(name) or "\0" in value:
            raise UsageError(
                f"{origin}: job.env name {name!r} is not allowed",
                hint="allowed: letters, digits and '_', not starting with a digit; no NUL in the value",
            )
        if name in RESERVED_ENVIRONMENT:
            raise UsageError(
                f"{origin}: job.env sets {name}, which the launcher sets for each rank",
                hint="remove it; use nproc_per_node, rendezvous and master_port instead",
            )

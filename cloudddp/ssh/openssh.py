"""The nodes as hosts of OpenSSH: a file for each cluster, and one line in ~/.ssh/config for all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from cloudddp.config import timing
from cloudddp.files import state_home
from cloudddp.local_state import SSH_CONFIG
from cloudddp.ssh.target import Target

_LOST_KEEPALIVES = 120  # until a session ends: half an hour, in which a laptop may sleep
# What the pattern of an Include may mean otherwise; `%` and `$` since OpenSSH 9.9.
_SPECIAL = re.compile(r"""[\x00-\x1f"'\\*?\[\]%$]""")


def config(hosts: Mapping[str, Target], known_hosts: Path) -> str:
    """Return the configuration of these hosts, by the names that `ssh` gets."""
    lines = ["# Written by cloudddp, which replaces and removes it."]
    for name, target in hosts.items():
        settings = [
            f"HostName={target.host}",
            f"Port={target.port}",
            f"User={target.user}",
            f"IdentityFile={_value(target.private_key)}",
            "IdentitiesOnly=yes",
            "StrictHostKeyChecking=yes",
            f"UserKnownHostsFile={_value(known_hosts)}",
            "GlobalKnownHostsFile=none",
            # It would lend the user's keys to the node, which is not trusted.
            "ForwardAgent=no",
            # So that the idle timer of the node can tell a quiet session from a computer that has vanished.
            f"ServerAliveInterval={max(round(timing.current().keepalive), 1)}",
            f"ServerAliveCountMax={_LOST_KEEPALIVES}",
            *target.route.openssh_options(target),
        ]
        lines += ["", f"Host {name}", *(f"  {setting.replace('=', ' ', 1)}" for setting in settings)]
    return "\n".join(lines) + "\n"


def _value(path: Path) -> str:
    """Return a path as OpenSSH reads it: it splits values at spaces and expands `%`."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def include_line() -> str:
    """Return the line that includes the hosts of every cluster of this computer."""
    return f'Include "{_SPECIAL.sub("?", str(state_home()))}/clusters/*/{SSH_CONFIG}"'

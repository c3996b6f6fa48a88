"""The nodes as hosts of OpenSSH: a file for each cluster, and one line in ~/.ssh/config for all of them."""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from cloudddp.config import timing
from cloudddp.errors import UsageError
from cloudddp.files import Folder, resolved, state_home
from cloudddp.local_state import SSH_CONFIG
from cloudddp.ssh.target import Target

USER_CONFIG = "~/.ssh/config"
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
            # So that the idle guard of the node can tell a quiet session from a computer that has vanished.
            f"ServerAliveInterval={max(round(timing.current().keepalive), 1)}",
            f"ServerAliveCountMax={_LOST_KEEPALIVES}",
            *target.route.openssh_options(target),
        ]
        lines += ["", f"Host {name}", *(f"  {one.replace('=', ' ', 1)}" for one in settings)]
    return "\n".join(lines) + "\n"


def _value(path: Path) -> str:
    """Return a path as OpenSSH reads it: it splits values at spaces and expands `%`."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def include_line() -> str:
    """Return the line that includes the hosts of every cluster of this computer."""
    return f'Include "{_SPECIAL.sub("?", str(state_home()))}/clusters/*/{SSH_CONFIG}"'


def is_included() -> bool:
    """Return whether the user's configuration has that line."""
    with contextlib.suppress(OSError, RuntimeError):  # there may be no home folder
        lines = Path(USER_CONFIG).expanduser().read_bytes().splitlines()
        return include_line().encode() in map(bytes.strip, lines)
    return False


def include() -> None:
    """Put the line at the top of the user's configuration, where no Host restricts it, unless it is there.
    Contents and mode stay, and a symbolic link stays one. Raises OSError, UsageError."""
    if is_included():
        return
    try:
        path = resolved(Path(USER_CONFIG).expanduser())
    except RuntimeError:
        raise UsageError(f"there is no home folder for {USER_CONFIG}", hint="set HOME") from None
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    before, mode = b"", 0o600
    with contextlib.suppress(FileNotFoundError):
        before, mode = path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
    with Folder.at(path.parent) as folder:
        folder.replace(path.name, f"{include_line()}\n\n".encode() + before, mode)

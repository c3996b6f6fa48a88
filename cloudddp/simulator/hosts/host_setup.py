"""The setup that both kinds of nodes in the lab have, and how it is passed to their boot modules.

Standard library only: the boot modules import it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class HostSetup(NamedTuple):
    """Folders, network and environment of a node.

    `disk` and `state` are folders in memory, of which `state` is new at each boot; `prefix` and `base_prefix`
    are those of the simulator's Python; `network_commands` are for `ip -batch`, in the node.
    """

    host_name: str
    disk: Path
    state: Path
    hosts_file: Path
    prefix: Path
    base_prefix: Path
    network_commands: str
    environment: dict[str, str]


def to_line(setup: HostSetup, **more: Any) -> str:
    """Return a setup, and the fields that only one kind has, as one line of JSON. Paths become strings."""
    return json.dumps({"setup": setup._asdict(), **more}, default=str)


def from_line(line: str) -> tuple[HostSetup, dict[str, Any]]:
    """Return the setup in a line, and the fields that only this kind has."""
    raw = json.loads(line)
    setup = raw.pop("setup")
    paths = {name: Path(setup[name]) for name in ("disk", "state", "hosts_file", "prefix", "base_prefix")}
    return HostSetup(**{**setup, **paths}), raw

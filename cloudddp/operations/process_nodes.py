"""The simulator's process nodes have no instance role and cannot power off: a command that needs either is
refused on them, with the way to namespace nodes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cloudddp.config.checks import uses_of_role
from cloudddp.config.spec import Config
from cloudddp.errors import UsageError
from cloudddp.files import state_home

if TYPE_CHECKING:
    from cloudddp.simulator.control import Simulator


def in_use() -> Simulator | None:
    """Return the simulator, if this command uses it and its nodes are processes."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    if not endpoint:
        return None
    # Imported here: it takes 20 ms, and commands on AWS do not need it.
    from cloudddp.simulator import control

    found = control.find(state_home())
    if found is None or found.endpoint != endpoint or found.has_lab:
        return None
    return found


def refuse(what: str, instead: str) -> None:
    """Raise UsageError if this command uses process nodes, with this message and what to do `instead`."""
    if found := in_use():
        raise UsageError(
            what,
            hint=f"{instead}; or use namespace nodes (now processes: {found.why}): `cloudddp sim stop`, then "
            "`cloudddp sim start --nodes namespace`",
        )


def check_role(settings: Config) -> None:
    """Raise UsageError if this command uses process nodes and a setting needs the role of the nodes."""
    if uses := uses_of_role(settings.job, settings.data):
        refuse(
            f"{uses[0].setting} needs an instance role, which the simulator's process nodes do not have",
            "leave it out of the rehearsal",
        )

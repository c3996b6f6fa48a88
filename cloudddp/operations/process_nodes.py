"""The simulator's process nodes are processes of this computer: what needs a host of its own is refused on
them, with the way to nodes that are one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cloudddp.config.spec import Config
from cloudddp.errors import Command, Text, UsageError, parts
from cloudddp.files import state_home

if TYPE_CHECKING:
    from cloudddp.simulator.control import Simulator


def in_use() -> Simulator | None:
    """Return the simulator, if this command uses it and its nodes are processes."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    if not endpoint:
        return None
    # 20 ms, which commands for AWS need not take.
    from cloudddp.simulator import control

    found = control.find(state_home())
    return None if found is None or found.endpoint != endpoint or found.nodes != "process" else found


def refuse(what: str, instead: Text) -> None:
    """Raise UsageError if this command uses process nodes: they cannot do `what`. The hint is what to do
    `instead`, and how to get namespace nodes."""
    if found := in_use():
        raise UsageError(
            f"{what}; the simulator's process nodes cannot ({found.why})",
            hint=(
                *parts(instead),
                "; or, for nodes that are separate hosts, ",
                Command("sim", "stop"),
                " and ",
                Command("sim", "start", "--nodes", "namespace"),
            ),
        )


def check(settings: Config) -> None:
    """Raise UsageError if this command uses process nodes and the settings need a role of the nodes."""
    names = [f"[[data]] source = {one.source!r}" for one in settings.data if one.is_s3]
    names += [f"[job] results_s3 = {settings.job.results_s3!r}"] if settings.job.results_s3 else []
    for name in names[:1]:
        refuse(f"{name} needs nodes that have a role", "rehearse with a local folder")

"""What `down` would end: running jobs and results that nobody has pulled, as the nodes report them.

The nodes get a few seconds to answer: nothing here may keep `down` from ending the bill.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cloudddp.cli.collect import pull_line
from cloudddp.cli.say import named

if TYPE_CHECKING:
    from cloudddp.cluster import Cluster
    from cloudddp.protocol import NewReply
    from cloudddp.spec import Config
    from cloudddp.ssh.connection import Target

PATIENCE = 5.0  # seconds for all nodes together


def at_stake(found: Cluster, settings: Config) -> list[str]:
    """Return a line for each running job and each node with results that were not pulled. Never fails."""
    from cloudddp import cluster

    try:
        targets = cluster.targets(found, settings.cluster)
    except Exception:  # no key, or a node without an address
        return [
            "cannot check for running jobs and results not pulled yet: this computer has no key for its nodes"
        ]
    replies: dict[int, NewReply] = {}
    waiting = threading.Thread(target=_ask, args=(targets, settings, replies), daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
    return _lines(dict(replies), sorted(targets))


def _ask(targets: dict[int, Target], settings: Config, replies: dict[int, NewReply]) -> None:
    from cloudddp import outputs
    from cloudddp.cluster import PROJECT
    from cloudddp.ssh.fleet import Fleet, each

    def one(node: int) -> None:
        with Fleet({node: targets[node]}) as fleet:
            fleet.connect(connect_timeout=PATIENCE)
            replies[node] = outputs.ask(fleet, node, settings.job, project=PROJECT, timeout=PATIENCE)

    each({node: (lambda node=node: one(node)) for node in targets}, fatal=lambda _: False)  # type: ignore[misc]


def _lines(replies: dict[int, NewReply], nodes: list[int]) -> list[str]:
    from cloudddp import outputs

    running: dict[str, list[int]] = {}
    for node, reply in sorted(replies.items()):
        for job in reply.running:
            running.setdefault(job, []).append(node)
    lines = [f"job {job} is running on {named(where)}" for job, where in sorted(running.items())]
    kept = outputs.held(replies)
    for held in kept:
        jobs = ", ".join(one.job for one in replies[held.node].jobs)
        what = outputs.described((*held.outputs, *held.others)) or "files"
        lines.append(f"not pulled from node {held.node}: {what}" + (f" of job {jobs}" if jobs else ""))
    if kept:
        lines.append(
            f"the files are deleted with the nodes; to keep them, first: {pull_line(kept, replies, outputs=True)}"
        )
    if silent := [node for node in nodes if node not in replies]:
        lines.append(f"{named(silent)} did not answer: its jobs and results are unknown")
    return lines

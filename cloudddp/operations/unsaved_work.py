"""What `down` would destroy: running jobs and results that were not pulled, as the nodes report them within a
few seconds: nothing here may prevent `down` from terminating them."""

from __future__ import annotations

import threading

from cloudddp.agent import client
from cloudddp.agent.protocol.results import NewFilesReply
from cloudddp.aws.client import AWS
from cloudddp.cluster import connect, lookup
from cloudddp.cluster.model import Cluster
from cloudddp.config import timing
from cloudddp.config.spec import Config
from cloudddp.errors import Message
from cloudddp.job.results import new_files
from cloudddp.operations.results_on_nodes import line_of, pull_command
from cloudddp.ssh.fleet import Fleet
from cloudddp.text import node_list


def unsaved_work(found: Cluster, settings: Config, *, jobs: bool = True, aws: AWS | None = None) -> list[str]:
    """Return a message for each running job (with `jobs`) and each node with results that were not pulled.
    Never fails. `aws` is asked about nodes that do not answer."""
    try:
        targets, lost = connect.targets(found, settings.cluster)
    except Exception as error:
        return [f"cannot check for running jobs and results not pulled yet: {error}"]
    limit = timing.current().unsaved_work
    replies: dict[int, NewFilesReply] = {}

    def ask() -> None:
        with Fleet(targets) as fleet:
            request = new_files.request(fleet, settings.job, "")

            def one(node: int) -> None:
                fleet.connect_node(node, connect_timeout=limit)
                replies[node] = client.call(fleet, node, request, timeout=limit)

            fleet.each(one, fatal=lambda _: False)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(limit)
    known = dict(replies)
    silent = targets.keys() - known.keys()
    problems = lookup.status_problems(aws, found, silent) if aws is not None else {}
    unknown = [str(error) for error in lost.values()]
    unknown += [f"node {node} did not answer ({text})" for node, text in sorted(problems.items())]
    if others := silent - problems.keys():
        unknown.append(f"{node_list(others)} did not answer")
    lines = [f"{what}: jobs and results there are unknown" for what in unknown]
    return [*_messages(known, jobs=jobs), *lines]


def _messages(replies: dict[int, NewFilesReply], *, jobs: bool) -> list[str]:
    running: dict[str, list[int]] = {}
    for node, reply in sorted(replies.items()) if jobs else ():
        for job in reply.running:
            running.setdefault(job, []).append(node)
    messages = [f"job {job} is running on {node_list(where)}" for job, where in sorted(running.items())]
    kept = new_files.by_node(replies)
    for node, reply in kept.items():
        of = ", ".join(one.job for one in reply.jobs)
        messages.append(f"not pulled from {line_of(node, reply)}" + (f" of job {of}" if of else ""))
    if kept:
        command = pull_command(kept, [new for one in kept.values() for new in (*one.outputs, *one.others)])
        messages.append(Message(f"the files are deleted with the nodes; to keep them, first: {command}"))
    return messages

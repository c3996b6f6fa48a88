"""The stacks of a job's ranks, from all nodes at once; and py-spy for nodes that cannot install it
themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.stacks import MAX_STACKS, RankStack, StacksReply, StacksRequest
from cloudddp.cluster.model import Cluster
from cloudddp.errors import Text
from cloudddp.job import tools

SECONDS = 180.0  # py-spy may have to be installed first


def gather(
    runner: Runner, cluster: Cluster, job_id: str, progress: Callable[[Text], None]
) -> dict[int, tuple[RankStack, ...]]:
    """Return the stacks of the ranks that run, by node. Raises NodeError; NoSuchJob if a node does not know
    the job."""
    tool = tools.local()
    replies = _ask(runner, StacksRequest(job_id, install=tool is None), runner.nodes)
    lacking = {node for node, reply in replies.items() if reply.lacks_tool and tool is not None}
    if tool is not None and lacking:
        alike = {
            node: cluster.nodes[node].private_ip
            for node in lacking
            if replies[node].platform == tool.platform
        }
        if alike:
            progress(f"sending py-spy to node {', '.join(map(str, sorted(alike)))}")
            tool.send(runner, alike, progress).all()
        replies |= _ask(runner, StacksRequest(job_id), lacking)
    return {node: reply.ranks for node, reply in sorted(replies.items())}


def _ask(runner: Runner, request: StacksRequest, nodes: Iterable[int]) -> dict[int, StacksReply]:
    requests = dict.fromkeys(nodes, request)
    return client.run_on_all(runner, requests, timeout=SECONDS, limit=MAX_STACKS).all()

"""The stacks of a job's ranks, from all nodes at once; and py-spy for nodes that cannot install it themselves."""

from __future__ import annotations

from collections.abc import Callable

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.stacks import MAX_STACKS, RankStack, StacksReply, StacksRequest
from cloudddp.job import tools

SECONDS = 180.0  # py-spy may have to be installed first


def gather(runner: Runner, job_id: str, progress: Callable[[str], None]) -> dict[int, tuple[RankStack, ...]]:
    """Return the stacks of the ranks that run, by node. Raises NodeError; NoSuchJob if a node does not know the job."""
    tool = tools.local()

    def ask(node: int) -> StacksReply:
        request = StacksRequest(job_id, install=tool is None)
        reply = client.call(runner, node, request, timeout=SECONDS, limit=MAX_STACKS)
        if not reply.lacks_tool or tool is None:
            return reply
        if reply.platform == tool.platform:
            progress(f"sending py-spy to node {node}")
            tool.send(runner, node)
        return client.call(runner, node, StacksRequest(job_id), timeout=SECONDS, limit=MAX_STACKS)

    return {node: reply.ranks for node, reply in runner.each(ask).all().items()}

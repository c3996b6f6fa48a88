"""The stacks of a job's ranks, from all nodes at once; and py-spy for nodes that cannot install it themselves."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.stacks import MAX_STACKS, RankStack, StacksReply, StacksRequest, ToolRequest

SECONDS = 180.0  # py-spy may have to be installed first
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}  # other names of the same


def gather(runner: Runner, job_id: str, progress: Callable[[str], None]) -> dict[int, tuple[RankStack, ...]]:
    """Return the stacks of the ranks that run, by node. Raises NodeError; NoSuchJob if a node does not know the job."""
    program = local_tool()

    def ask(node: int) -> StacksReply:
        request = StacksRequest(job_id, install=program is None)
        reply = client.call(runner, node, request, timeout=SECONDS, limit=MAX_STACKS)
        if not reply.lacks_tool or program is None:
            return reply
        if reply.platform == _platform():
            progress(f"sending py-spy to node {node}")
            data = program.read_bytes()
            tool = ToolRequest(len(data), hashlib.sha256(data).hexdigest())
            client.call(runner, node, tool, body=[data])
        return client.call(runner, node, StacksRequest(job_id), timeout=SECONDS, limit=MAX_STACKS)

    return {node: reply.ranks for node, reply in runner.each(ask).all().items()}


def local_tool() -> Path | None:
    """Return py-spy of this Python's environment: one static program. None where it is missing."""
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        path = folder / "py-spy"
        if path.is_file() and os.access(path, os.R_OK | os.X_OK):
            return path
    return None


def _platform() -> str:
    machine = platform.machine().lower()
    return f"{platform.system().lower()}-{MACHINES.get(machine, machine)}"

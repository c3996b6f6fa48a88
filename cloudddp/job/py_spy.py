"""The stacks of ranks, which the agents read with py-spy, also without a laptop: so `launch` sends that of
this computer, one static program, to the nodes that lack it, while the ranks run. Where this computer has
none, or is of another kind than the nodes, an agent takes that of the ranks' Python, or installs it with pip
into a folder of its own; without it, stacks are less exact."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.file_steps import ReceiveReply, ReceiveRequest
from cloudddp.agent.protocol.manifest import FILE, Entry
from cloudddp.agent.protocol.stacks import MAX_DUMPS, TOOLS, StacksReply, StacksRequest
from cloudddp.cluster.connect import PROJECT
from cloudddp.cluster.model import Cluster
from cloudddp.errors import CloudDDPError, StepWarning
from cloudddp.formats import plural
from cloudddp.job.project_files import ProjectFiles
from cloudddp.job.ranks import LaunchNode
from cloudddp.job.transfer import Transfer, View
from cloudddp.ssh.fleet import Outcome
from cloudddp.text import node_list, one_line

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}  # other names of the same
WAIT = 120.0  # seconds that `launch` waits at its end for py-spy to be sent
STACKS_SECONDS = 180.0  # for a node to return stacks: py-spy may have to be installed first


@dataclass(frozen=True, slots=True)
class Tool:
    """py-spy of this computer. `platform`: of the nodes that it runs on; `digest`: its SHA-256."""

    path: Path
    digest: str
    platform: str

    def send(
        self, runner: Runner, addresses: Mapping[int, str], progress: Callable[[str], None]
    ) -> Outcome[ReceiveReply]:
        """Put it on nodes, by their private addresses. Raises CloudDDPError if it cannot be read."""
        info = self.path.stat()
        entry = Entry(FILE, 0o755, info.st_size, info.st_mtime_ns, "")
        files = ProjectFiles(self.path.parent, {self.path.name: entry})
        return Transfer(runner, files, addresses, View(progress), ReceiveRequest(TOOLS)).run()


def local() -> Tool | None:
    """Return py-spy of this Python's environment, None where it is missing or cannot be read."""
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        path = folder / "py-spy"
        if path.is_file() and os.access(path, os.R_OK | os.X_OK):
            try:
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError:
                continue
            machine = platform.machine().lower()
            return Tool(path, digest, f"{platform.system().lower()}-{MACHINES.get(machine, machine)}")
    return None


class PySpyTransfer:
    """Sends py-spy to the nodes of a job that lack it, in a thread. A failure is a warning: the job runs."""

    def __init__(self, runner: Runner, nodes: Sequence[LaunchNode], progress: Callable[[str], None]) -> None:
        self._runner, self._progress = runner, progress
        self._is_abandoned = False
        self._thread: threading.Thread | None = None
        if (tool := local() if nodes else None) is None:
            return
        started = [(node, node.start_reply) for node in nodes if node.start_reply is not None]
        alike = [(one, reply) for one, reply in started if reply.platform == tool.platform]
        if missing := {one.rank: one.address for one, reply in alike if reply.tool != tool.digest}:
            count = plural(len(missing), "node")
            progress(f"sending py-spy to {count}, to read the stacks of a job that stalls")
            self._thread = threading.Thread(target=self._send, args=(tool, missing), daemon=True)
            self._thread.start()

    def _send(self, tool: Tool, missing: Mapping[int, str]) -> None:
        try:
            errors = [*tool.send(self._runner, missing, self._report).errors.values()]
        except (CloudDDPError, OSError) as error:
            errors = [error]
        for one in errors:
            self._report(StepWarning(f"could not send py-spy; stacks may be less exact: {one}"))

    def _report(self, text: str) -> None:
        if not self._is_abandoned:
            self._progress(text)

    def wait(self) -> None:
        """Wait for its end, for WAIT seconds at most: the job runs without it."""
        if self._thread is None:
            return
        self._thread.join(WAIT)
        if self._thread.is_alive():
            self._report(
                StepWarning(
                    f"could not send py-spy within {WAIT:g} s; stacks may be less exact; the next "
                    "launch sends it again"
                )
            )
            self.abandon()

    def abandon(self) -> None:
        """Report nothing from now on: the connections are about to be closed."""
        self._is_abandoned = True


def gather_stacks(
    runner: Runner, cluster: Cluster, job_id: str, progress: Callable[[str], None]
) -> dict[int, StacksReply]:
    """Return the stacks of the ranks that run, by node. Raises NodeError."""
    tool = local()
    replies = _ask(runner, StacksRequest(job_id, install=tool is None), runner.nodes)
    lacking = {node: reply for node, reply in replies.items() if reply.lacks_tool}
    if tool is not None and lacking:
        like = [node for node, reply in lacking.items() if reply.platform == tool.platform]
        if alike := {node: cluster.nodes[node].private_ip for node in like}:
            progress(f"sending py-spy to {node_list(alike)}")
            tool.send(runner, alike, progress).all()
        replies |= _ask(runner, StacksRequest(job_id), lacking)
    return dict(sorted(replies.items()))


def analyzed_dumps(runner: Runner, job_id: str, found: Mapping[int, StacksReply], python: str) -> str:
    """Return what PyTorch's analyzer concludes from the dumps of the flight recorder, '' where there are
    none. They pass through here as text, to the node that analyzes them with job.python. Raises NodeError."""
    packed = {node: reply.packed for node, reply in found.items() if reply.packed}
    if not packed:
        return ""
    request = StacksRequest(job_id, dumps=tuple(packed.values())[:MAX_DUMPS], project=PROJECT, python=python)
    return one_line(client.call(runner, min(packed), request, timeout=STACKS_SECONDS).conclusion)


def _ask(runner: Runner, request: StacksRequest, nodes: Iterable[int]) -> dict[int, StacksReply]:
    requests = dict.fromkeys(nodes, request)
    return client.call_all(runner, requests, timeout=STACKS_SECONDS)

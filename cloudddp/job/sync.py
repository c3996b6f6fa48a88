"""Syncs the project's files to the nodes: what differs, the size limit, and the messages.

Only files that a node lacks are sent (transfer.py); files deleted here are deleted there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cloudddp import timings
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.file_steps import REPLACED, ReceiveReply, ReceiveRequest
from cloudddp.agent.protocol.machine import ProbeReply, ProbeRequest
from cloudddp.agent.protocol.manifest import Manifest, path_from_wire
from cloudddp.agent.protocol.sharing import WIDTH
from cloudddp.cluster.connect import PROJECT, probe
from cloudddp.cluster.model import Cluster
from cloudddp.config.schema import number
from cloudddp.config.spec import Config
from cloudddp.errors import StepUpdate, StepWarning, UsageError, WarningWithCommands, inert, q
from cloudddp.formats import plural
from cloudddp.job.project_files import ProjectFiles
from cloudddp.job.ranks import LaunchNode
from cloudddp.job.transfer import Transfer, View
from cloudddp.text import one_line, size_of

Progress = Callable[[str], None]

SHOWN = 3  # files that are named
REPORT = 5.0  # seconds between two lines about a transfer that lasts


@dataclass(frozen=True)
class ProjectIdentity:
    """The id of this computer's project, "" for none. `agree` gets the nodes that have the files of another
    project, and raises CloudDDPError unless these may be replaced."""

    id: str = ""
    agree: Callable[[Sequence[int]], None] = lambda _: None

    def others(self, nodes: Iterable[LaunchNode]) -> list[int]:
        return [node.rank for node in nodes if self.id and node.probe.origin not in ("", self.id)]

    def check(self, nodes: Iterable[LaunchNode]) -> None:
        if others := self.others(nodes):
            self.agree(others)


UNKNOWN = ProjectIdentity()


def sync(
    runner: Runner,
    cluster: Cluster,
    config: Config,
    *,
    files: ProjectFiles,
    progress: Progress,
    origin: ProjectIdentity = UNKNOWN,
) -> None:
    """Sync the project's files to every node. Raises UsageError, NodeError, and what `origin` raises."""
    probes = probe(
        runner, cluster, ProbeRequest(PROJECT, "", config.job.python, files.digest, only_files=True)
    )
    nodes = launch_nodes(cluster, probes)
    origin.check(nodes)
    for job in sorted({job for reply in probes.values() if reply.differs for job in reply.running}):
        progress(StepWarning(f"job {job} is running while its files are changed"))
    update(runner, nodes, files, progress, origin, max_mb=config.sync.max_mb)


def launch_nodes(cluster: Cluster, probes: Mapping[int, ProbeReply]) -> list[LaunchNode]:
    return [
        LaunchNode(rank, cluster.nodes[rank].private_ip, reply, reply.version)
        for rank, reply in sorted(probes.items())
    ]


def update(
    runner: Runner,
    nodes: Sequence[LaunchNode],
    files: ProjectFiles,
    progress: Progress,
    origin: ProjectIdentity = UNKNOWN,
    *,
    max_mb: float,
    job: str = "",
) -> None:
    """Make the nodes' project folders like this computer's, and note their versions. A step runs on each node
    that lacks something, and on some that have everything and serve the others; none runs where nothing has
    changed. `job`: whose launch this is part of. Raises UsageError, NodeError."""
    others = origin.others(nodes)
    lacking = [node for node in nodes if node.probe.differs or node.rank in others]
    if not lacking:
        progress(f"files are up to date on every node ({len(files.manifest)} files)")
        return
    have = [node for node in nodes if node not in lacking][: -(-len(lacking) // WIDTH)]
    announced = _Announced(files, max_mb, len(lacking), progress)
    transfer = Transfer(
        runner,
        files,
        {one.rank: one.address for one in (*have, *lacking)},
        announced,
        ReceiveRequest(PROJECT, origin=origin.id, job=job),
        {node.rank: node.version for node in nodes},
    )
    with timings.span("send files"):
        outcome = transfer.run()
    if not outcome.errors:
        announced.end()
    for path in transfer.unstable[:SHOWN]:
        progress(
            StepWarning(f"{one_line(path)} was changing while it was sent; the next sync sends it again")
        )
    report_replaced(outcome.values, progress)
    replies = outcome.all()
    for one in (*have, *lacking):
        one.version = replies[one.rank].version


def report_replaced(replies: Mapping[int, ReceiveReply], progress: Progress) -> None:
    """Name files of jobs in whose place sent ones are now."""
    for node, reply in replies.items():
        if (replaced := reply.replaced) is None:
            continue
        names = [inert(one_line(path_from_wire(name), 80)) for name in replaced.names[:SHOWN]]
        more = [f"{replaced.count - len(names)} more"] if replaced.count > len(names) else []
        text = (
            f"node {node}: a job wrote {', '.join(names + more)}, which was not pulled and is in "
            f"the way: it was moved to {REPLACED} there; `cloudddp pull {q(REPLACED)} --node {q(node)}` "
            "copies it"
        )
        progress(WarningWithCommands(text))


class _Announced(View):
    """Checks what the nodes want, announces it, and reports how much of a transfer that lasts has left this
    computer. `lacking` nodes lack something."""

    def __init__(self, files: ProjectFiles, max_mb: float, lacking: int, progress: Progress) -> None:
        super().__init__(progress)
        self._files, self._max_mb, self._lacking = files, max_mb, lacking
        self._total = 0  # bytes of the files that are sent from here
        self._bytes = self._shown = self._copied = 0
        self._began = self._at = time.monotonic()  # of the last report

    def approve(self, lacking: Mapping[int, Sequence[str]], here: Collection[int], delete: int) -> None:
        """Say what is sent to the nodes `here`. Raise UsageError where too much would be sent to a node."""
        same = all(names == lacking[min(lacking)] for names in lacking.values())
        for node, names in sorted(lacking.items()):
            check_size(self._files, names, self._max_mb, node=None if same else node)
        sent = {name for node in here for name in lacking[node]}
        self._total = sum(self._files.manifest[name].size for name in sent)
        to, deleted = plural(self._lacking, "node"), f"deleting {plural(delete, 'file')}"
        nothing, more = "; nothing is sent from this computer", f"; {deleted}" if delete else ""
        if sent:
            what = f"sending {plural(len(sent), 'file')}, {size_of(self._total)}, to {to}{more}"
        elif any(lacking.values()):
            what = f"copying files from node to node, to {to}{nothing}{more}"
        else:
            what = (f"{deleted} on {to}" if delete else f"updating modes, times and links on {to}") + nothing
        self.note(what)

    def sent(self, size: int) -> None:
        self._bytes += size
        now = time.monotonic()
        if now - self._at < REPORT:
            return
        rate = int((self._bytes - self._shown) / max(now - self._at, 1e-6))
        of = f"{size_of(self._bytes)} of {size_of(max(self._total, self._bytes))}"
        self.note(StepUpdate(f"sent {of}, {size_of(rate)}/s"))
        self._at, self._shown = now, self._bytes

    def copied(self) -> None:
        self._copied += 1
        if time.monotonic() - self._at >= REPORT:
            self.note(StepUpdate(f"copied from node to node, to {self._copied} of {self._lacking} nodes"))
            self._at = time.monotonic()

    def end(self) -> None:
        """Report that a transfer of which parts were reported is complete."""
        if self._at > self._began:
            have = "has" if self._lacking == 1 else "have"
            self.note(f"{plural(self._lacking, 'node')} now {have} all files")


def check_size(files: ProjectFiles, names: Iterable[str], max_mb: float, *, node: int | None = None) -> None:
    """Raise UsageError where a sync would send more than `max_mb`, without [[data]], to all nodes or to
    one."""
    manifest = files.manifest
    names = [name for name in names if not files.is_data(name)]
    size = sum(manifest[name].size for name in names)
    if size <= max_mb * 2**20:
        return
    top = "; ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in largest(manifest, names))
    whom = "every node" if node is None else f"node {node}"
    raise UsageError(
        f"the sync would send {size / 2**20:.0f} MiB to {whom}, more than sync.max_mb = {number(max_mb)}: "
        f"{top}",
        hint="add what is not needed on the nodes to .gitignore or sync.exclude; name what the job reads in "
        "[[data]], or raise sync.max_mb",
    )


def largest(manifest: Manifest, names: Iterable[str]) -> list[tuple[str, int]]:
    """Return the three largest top-level folders or files among `names`, with their bytes."""
    sizes = Counter[str]()
    for name in names:
        sizes[name.split("/")[0] + "/" * ("/" in name)] += manifest[name].size
    return sizes.most_common(3)

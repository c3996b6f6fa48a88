"""Syncs the project's files to the nodes: what differs, the size limit, and the messages.

Only files that a node lacks are sent (transfer.py); files deleted here are deleted there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cloudddp import timings
from cloudddp.agent import replies
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.file_steps import REPLACED, Kept, ReceiveReply, ReceiveRequest
from cloudddp.agent.protocol.machine import ProbeReply, ProbeRequest
from cloudddp.agent.protocol.manifest import MAX_FILES, MAX_LISTED, Manifest, path_from_wire
from cloudddp.agent.protocol.phases import Peer
from cloudddp.agent.protocol.transfer import Listing, Wants
from cloudddp.cluster.connect import probe
from cloudddp.cluster.model import Cluster
from cloudddp.config.schema import number
from cloudddp.config.spec import Config
from cloudddp.errors import Message, StepUpdate, UsageError, inert, q
from cloudddp.job.file_contents import Contents
from cloudddp.job.project_files import Snapshot
from cloudddp.job.transfer import Transfer
from cloudddp.text import one_line, size_of

Progress = Callable[[str], None]

SHOWN = 3  # files that are named
REPORT = 5.0  # seconds between two lines about a transfer that lasts


@dataclass(frozen=True)
class Origin:
    """The id of this computer's project, "" for none. `agree` gets the nodes that have the files of another
    project, and raises CloudDDPError unless these may be replaced."""

    id: str = ""
    agree: Callable[[Sequence[int]], None] = lambda _: None

    def others(self, probes: Mapping[int, ProbeReply]) -> list[int]:
        return [
            node for node, reply in sorted(probes.items()) if self.id and reply.origin not in ("", self.id)
        ]

    def check(self, probes: Mapping[int, ProbeReply]) -> None:
        if nodes := self.others(probes):
            self.agree(nodes)


UNKNOWN = Origin()


def sync(
    runner: Runner,
    cluster: Cluster,
    config: Config,
    *,
    files: Snapshot,
    progress: Progress,
    origin: Origin = UNKNOWN,
) -> None:
    """Sync the project's files to every node. Raises UsageError, NodeError, and what `origin` raises."""
    probes = probe(
        runner,
        cluster,
        manifest=files.digest,
        python=config.job.python,
        only_files=True,
        then=(ReceiveRequest.STEP,),
    )
    origin.check(probes)
    for job in sorted({job for reply in probes.values() for job in reply.running}):
        progress(f"warning: job {job} is running while its files are changed")
    update(runner, cluster, probes, config, files, progress, origin)


def update(
    runner: Runner,
    cluster: Cluster,
    probes: Mapping[int, ProbeReply],
    config: Config,
    files: Snapshot,
    progress: Progress,
    origin: Origin = UNKNOWN,
    *,
    job: str = "",
) -> dict[int, int]:
    """Make the nodes' project folders like this computer's: one step on each node, or none where nothing has
    changed.

    `probes`: each node's reply to a probe. `job`: whose launch this is part of. Return the version of the
    files on each node. Raises UsageError, NodeError.
    """
    versions = {node: reply.version for node, reply in probes.items()}
    theirs = {node: reply.folders for node, reply in probes.items() if reply.folders is not None}
    others = origin.others(probes)
    theirs.update({node: theirs.get(node, {}) for node in others})
    if not theirs:
        progress(f"files are up to date on every node ({len(files.manifest)} files)")
        return versions
    _check_folders(theirs, files.folder_digests)
    order = order_of(theirs, probes, files.folder_digests)
    folders = different_folders(theirs.values(), files.folder_digests)
    if others:  # there, equal digests do not mean equal contents
        folders |= files.folder_digests.keys()
    contents = Contents(files.root, files.locate)
    listing = _listing(files, folders, contents, known=any(theirs.values()))
    announced = _Announced(files, listing, config.sync.max_mb, order, len(theirs), progress)
    transfer = Transfer(
        runner,
        files.root,
        listing,
        [Peer(node, cluster.nodes[node].private_ip, probes[node].free_port) for node in order],
        origin=origin.id,
        versions=versions,
        job=job,
        approve=announced.approve,
        note=progress,
        on_sent=contents.sent,
        on_bytes=announced.add,
        locate=files.locate,
    )
    with timings.span("send files"):
        outcome = transfer.run()
    if not outcome.errors:
        announced.end()
    contents.save(files.manifest)
    for path in contents.unstable[:SHOWN]:
        progress(f"warning: {one_line(path)} was changing while it was sent; the next sync sends it again")
    report_replaced(outcome.values, progress)
    return versions | {node: reply.version for node, reply in outcome.all().items() if reply}


def report_replaced(replies: Mapping[int, ReceiveReply | None], progress: Progress) -> None:
    """Name files of jobs in whose place sent ones are now."""
    for node, reply in replies.items():
        if reply and reply.replaced:
            progress(_kept(node, reply.replaced))


def _kept(node: int, replaced: Kept) -> str:
    """Return the warning about files of jobs that were moved out of the way of the files that were sent."""
    names = [inert(one_line(path_from_wire(name), 80)) for name in replaced.names[:SHOWN]]
    more = [f"{replaced.count - len(names)} more"] if replaced.count > len(names) else []
    return Message(
        f"warning: node {node}: a job wrote {', '.join(names + more)}, which was not pulled and is in the "
        f"way of the files that were sent: it was moved to {REPLACED} on that node; `cloudddp pull "
        f"{q(REPLACED)} --node {q(node)}` copies it"
    )


class _Announced:
    """Checks what the nodes want, announces it, and reports how much of a transfer that lasts has left this
    computer. Of the `order` of nodes, `lacking` lack something."""

    def __init__(
        self,
        files: Snapshot,
        listing: Listing,
        max_mb: float,
        order: Sequence[int],
        lacking: int,
        progress: Progress,
    ) -> None:
        self._files, self._entries, self._max_mb = files, listing.entries(), max_mb
        self._order, self._lacking = order, lacking
        self._progress = progress
        self._is_announced = self._is_everything_approved = False
        self._total = 0  # bytes of the files
        self._sent = self._shown = 0
        self._at = time.monotonic()  # of the last report

    def approve(self, node: int, wants: Wants) -> None:
        """Raise UsageError where too much would be sent to a node."""
        if wants.everything and self._is_everything_approved:
            return  # the same files as for another node
        first = self._order[0]
        names = [path_from_wire(self._entries[index][0]) for index, _ in wants.of(self._entries)]
        check_size(self._files, names, self._max_mb, node=None if node == first else node)
        self._is_everything_approved = self._is_everything_approved or wants.everything
        if not self._is_announced:
            is_complete = len(self._order) > self._lacking  # the first node
            self._total = sum(self._files.manifest[name].size for name in names)
            shown = _summary(len(names), self._total, wants.delete, self._lacking, from_nodes=is_complete)
            self._progress(shown)
            self._is_announced = True

    def add(self, size: int) -> None:
        self._sent += size
        now = time.monotonic()
        if now - self._at < REPORT:
            return
        rate = int((self._sent - self._shown) / max(now - self._at, 1e-6))
        of = f"{size_of(self._sent)} of {size_of(max(self._total, self._sent))}"
        self._progress(StepUpdate(f"sent {of}, {size_of(rate)}/s"))
        self._at, self._shown = now, self._sent

    def end(self) -> None:
        """Report that a transfer of which parts were reported is complete."""
        if self._shown:
            self._progress(f"sent all of {size_of(self._total)}")


def _listing(files: Snapshot, folders: Iterable[str], contents: Contents, *, known: bool) -> Listing:
    """Return what these folders have. `known`: a node may have files with another time or name, and the same
    contents."""
    listed = {folder: files.folders.get(folder, {}) for folder in sorted(folders)}
    listing = Listing(listed)
    if not known:
        return listing
    paths = {path_from_wire(path): path for path, _ in listing.entries()}
    found = contents.of_known(files.manifest, paths)
    return Listing(listed, {paths[path]: digest for path, digest in found.items()})


def _summary(count: int, size: int, delete: int, nodes: int, *, from_nodes: bool) -> str:
    """Return what is about to be done. `from_nodes`: a node has all files, and the others get them from
    it."""
    to = f"{nodes} node{'s' * (nodes != 1)}"
    deleted = f"deleting {delete:,} file{'s' * (delete != 1)}"
    deleting = f"; {deleted}" if delete else ""
    if count:
        return f"sending {count} file{'s' * (count != 1)}, {size_of(size)}, to {to}{deleting}"
    if from_nodes:
        what = f"copying files from node to node, to {to}"
    elif delete:
        what, deleting = f"{deleted} on {to}", ""
    else:
        what = f"updating names, modes and links on {to}"
    return f"{what}; nothing is sent from this computer{deleting}"


# -- what differs ------------------------------------------------------------------------------------------


def different_folders(theirs: Iterable[Mapping[str, str]], ours: Mapping[str, str]) -> set[str]:
    """Return the folders that differ on some node, from the digests of the folders there and here."""
    found: set[str] = set()
    for folders in theirs:
        found |= {folder for folder, digest in ours.items() if folders.get(folder) != digest}
        found |= folders.keys() - ours.keys()
    return found


def _check_folders(theirs: Mapping[int, Mapping[str, str]], ours: Mapping[str, str]) -> None:
    """Raise NodeError where the nodes report more folders that are not here than a listing has, for the node
    with the most."""
    others = {node: folders.keys() - ours.keys() for node, folders in theirs.items()}
    if len(set().union(*others.values())) > MAX_LISTED - MAX_FILES:
        node = max(others, key=lambda one: len(others[one]))
        error = ProtocolError(f"it has {len(others[node]):,} folders that were not sent to it")
        raise replies.unreadable(node, ProbeRequest.STEP, error)


def order_of(
    theirs: Mapping[int, Mapping[str, str]], nodes: Iterable[int], ours: Mapping[str, str]
) -> list[int]:
    """Return the nodes that take part, the one that lacks least first: it gets the files
    from this computer, or only passes on what it has."""
    complete = sorted(set(nodes) - theirs.keys())[:1]
    lacking = sorted(theirs, key=lambda node: (len(different_folders([theirs[node]], ours)), node))
    return complete + lacking


def check_size(files: Snapshot, names: Iterable[str], max_mb: float, *, node: int | None = None) -> None:
    """Raise UsageError, naming the largest folders, where a sync would send more than `max_mb`, without
    [[data]]: to all nodes, or to one."""
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

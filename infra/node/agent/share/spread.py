"""Before ranks start: the newest snapshot, or the newest version of each shared file, is copied to the nodes
that lack it.

Where the user has named no files to share, what jobs wrote on some nodes only is copied to the others. This
is best effort: if it fails, a note is logged, and the ranks start.

Each node finds its files and tells the others, with a port at which they can get them. So all nodes know
which of them are the newest, who lacks them, and in which rounds those get them (protocol/sharing.py). The
ranks start once all have them. A script that sends its snapshot to all ranks by itself, as train/ does, needs
none of this.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Callable, Optional

from agent.files import records
from agent.files.checkpoints import Files
from agent.files.records import Results, Writer
from agent.files.selection import is_checkpoint
from agent.jobs import job_record
from agent.node import store
from agent.node.link import REFUSED, Link, LinkError, Server
from agent.node.shared_memory import last_line
from agent.share import offers
from agent.share.copying import Exchange
from agent.sync.replaced import set_aside
from cloudddp.agent.protocol import checkpoints
from cloudddp.agent.protocol.checkpoints import Checkpoints, folder_of, listed, writer_of
from cloudddp.agent.protocol.codec import MAX_TEXT
from cloudddp.agent.protocol.file_steps import REPLACED
from cloudddp.agent.protocol.gang import Kind, PeerMessage
from cloudddp.agent.protocol.sharing import (
    LATEST,
    MAX_SHARED,
    Copy,
    Offered,
    SharedFiles,
    SnapshotSearch,
    checkpoints_of,
    copies,
    differing,
    refusal,
    rounds,
)
from cloudddp.agent.protocol.start import StartRequest

CONNECT = 15.0  # seconds to connect to a node that has files
LONGEST = 3600.0  # seconds for all of it: a disk may never answer
PAUSE = 0.02  # seconds between two looks at what other nodes have said
WAIT = 2.0  # seconds for the thread to end
SHOWN = 3  # damaged snapshots that are named
PURPOSE = "spread"


class _Incomplete(LinkError):
    """Ranks must not start with the checkpoints that there are; the text says why."""


class PeerCopy:
    """The part of one node. A thread finds files and gets others; `turn` sends what it has to say. `error`:
    why this node cannot take part, or ''."""

    def __init__(
        self, request: StartRequest, search: SnapshotSearch, attempt: int, send: Callable[[PeerMessage], None]
    ) -> None:
        self._request, self._search, self._send = request, search, send
        self._is_fresh = not (attempt or request.resumed_from)
        self._by_default = not search.patterns
        self._node, self._secret = request.node, request.gang.secret
        self._peers = {peer.node: peer for peer in request.gang.peers}
        self._ids = {peer.node: peer.id for peer in request.gang.peers}
        self._project = store.project_folder(request.project)
        begun = f"begun-share-{self._project.name}"
        self._exchange = Exchange(self._secret, self._project, begun, durable=not self._by_default)
        self._offers: dict[int, SharedFiles] = {}
        self._ready: set[int] = set()  # nodes that have what they lacked
        self._own: queue.SimpleQueue[PeerMessage] = queue.SimpleQueue()
        self._files: Optional[list[Offered]] = None  # that are copied: the same ones on all nodes
        self._server = Server(self._secret, PURPOSE, len(self._peers), self._give)
        self._link: Optional[Link] = None  # to the node that sends files to this one
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._closed = False
        self._ends_at = float("inf")
        self.error = ""

    def start(self) -> None:
        self._ends_at = time.monotonic() + LONGEST
        self._thread.start()

    def act(self, node: int, message: PeerMessage) -> None:
        """Take a message of a node. It may come before the start."""
        if message.kind is Kind.SNAPSHOT and message.offer is not None:
            self._offers.setdefault(node, message.offer)
        elif message.kind is Kind.COPIED:
            self._ready.add(node)

    @property
    def is_done(self) -> bool:
        """Whether every node has the files that it lacked."""
        return self._ready == self._peers.keys()

    def turn(self) -> None:
        """Send what the other nodes have to know."""
        if self._node not in self._ready and not self.error and time.monotonic() > self._ends_at:
            self._give_up(f"files were not copied within {LONGEST / 60:.0f} min")
        while not self._own.empty():
            message = self._own.get()
            self.act(self._node, message)
            self._send(message)

    def close(self) -> None:
        """End what runs. A file that was begun stays for the next attempt."""
        self._closed = True
        self._server.close()
        if (link := self._link) is not None:
            link.end()
        if self._thread.is_alive():
            self._thread.join(WAIT)

    def _run(self) -> None:
        """Offer what this node has, and get what it lacks."""
        step = "its files were not found"
        try:
            self._own.put(PeerMessage(Kind.SNAPSHOT, offer=self._offer()))
            step = "files were not copied"
            self._wait(lambda: len(self._offers) == len(self._peers))
            known = checkpoints_of(self._offers)
            self._check_checkpoints(known)
            if wanted := self._wanted(known):
                self._get(wanted)
        except Exception as error:  # of which the supervisor must know, whatever it is
            text = str(error) if isinstance(error, LinkError) else f"{step}: {last_line(error)}"
            self._give_up(text, needed=isinstance(error, _Incomplete))
        else:
            self._own.put(PeerMessage(Kind.COPIED))

    def _give_up(self, text: str, *, needed: bool = False) -> None:
        """The ranks start without the files, unless these are `needed`, or the user has named them."""
        if needed or not self._by_default:
            self.error = text[:MAX_TEXT]
            return
        if not self._closed:
            self._note(text)
        self._own.put(PeerMessage(Kind.SNAPSHOT, offer=SharedFiles(())))  # unless it has sent one
        self._own.put(PeerMessage(Kind.COPIED))

    def _wait(self, is_met: Callable[[], bool]) -> None:
        """Wait for what other nodes say, or another thread does. Raises LinkError when it is closed."""
        while not is_met():
            if self._closed:
                raise LinkError("it was ended")
            time.sleep(PAUSE)

    def _note(self, text: str) -> None:
        job_record.note(store.job_folder(self._request.job), text)

    # -- what is to be done ----------------------------------------------------------------------------------

    def _offer(self) -> SharedFiles:
        """Return what this node has, and listen for those that lack it."""
        set_aside(self._project, Files(self._project).stale_copies())
        found, damaged = offers.of_node(self._search)
        for name in damaged[:SHOWN]:
            self._note(f"node {self._node}: {name} is damaged; an older snapshot is used")
        older = [os.path.join(part.folder, name) for part in found.parts for name in part.older]
        if older := set_aside(self._project, older):
            self._note(f"moved to {REPLACED}, since newer ones are beside them: {listed(older)}")
            found = replace(found, files=tuple([one for one in found.files if one.path not in older]))
        if len(self._peers) > 1:
            found = replace(found, port=self._server.listen(self._peers[self._node].address, 0))
        return found

    def _check_checkpoints(self, known: Checkpoints) -> None:
        """Raise _Incomplete if ranks must not start with the checkpoints that there are."""
        for folder in known.incomplete() if self._node == min(self._peers) else ():
            what = f"moved to {REPLACED}" if folder in known.superseded() else "not copied"
            self._note(f"{what}: {checkpoints.refusal(folder, known.problems)}")
        if blocking := known.blocking(self._peers, fresh=self._is_fresh):
            raise _Incomplete(checkpoints.refusal(blocking[0], known.problems))

    def _wanted(self, known: Checkpoints) -> list[Copy]:
        """Plan what is copied, and return what this node gets. Checkpoints make way that are incomplete while
        an older one is complete, since scripts that load the newest would load different ones; and those that
        a newer one would be mixed with."""
        usable = self._usable()
        several = self._search.every or self._by_default
        planned = copies(usable, self._ids, every=several, replaces=not self._by_default)
        self._files = [one.file for one in planned]
        wanted = [one for one in planned if self._node in one.lacking]
        if self._by_default:
            self._note_differences(usable)
            wanted = self._fitting(wanted)
        folders = {folder_of(one.file.path, known.parts) for one in wanted} - {None}
        older = [folder for folder in folders if folder and self._node not in known.holders(folder)]
        aside = [one for one in {*known.superseded(), *older} if self._node in known.parts[one]]
        try:
            set_aside(self._project, aside)
        except OSError as error:
            raise _Incomplete(f"{listed(aside)} cannot be moved away: {error}") from None
        what = "which only some nodes have" if several else "the newest snapshot"
        given = [one for one in planned if self._node == one.holders[0]]
        for (holders, lacking), group in _grouped((*given, *wanted)).items():
            files = [one.file for one in group]
            size, where = sum(one.size for one in files) / 1e6, ", ".join(map(str, lacking))
            names = listed([one.path for one in files])
            self._note(f"copying {names}, {size:,.1f} MB, {what}, from node {holders[0]} to node {where}")
        return wanted

    def _usable(self) -> dict[int, SharedFiles]:
        """Return the offers without the files that are not written here. Raises LinkError if the user has
        named what is shared, and a node offers another file."""
        usable, latest = {}, (time.time() + LATEST) * 1e9
        for node, offer in sorted(self._offers.items()):
            left = {one.path: why for one in offer.files if (why := refusal(one, self._search, latest))}
            why = next(iter(left.values()), "")
            if left and not self._by_default:
                raise LinkError(f"node {node} reports its newest snapshot, and {why}: nothing was copied")
            if left:
                self._note(f"not copied from node {node}: {listed(left)}; {why}")
            files = [one for one in offer.files if one.path not in left]
            usable[node] = replace(offer, files=tuple(files))
        is_first, has_any = self._node == min(self._peers), any(one.files for one in usable.values())
        if not self._by_default and self._request.resumed_from and is_first and not has_any:
            self._note(f"no node has a snapshot that matches {', '.join(self._search.patterns)}")
        return usable

    # -- by default ------------------------------------------------------------------------------------------

    def _fitting(self, wanted: list[Copy]) -> list[Copy]:
        """Return what this node gets of what it lacks: nothing that replaces a file but an older copy of the
        same one, and at most half of the free space. Raises OSError."""
        known = records.results(self._project)
        obstacles = {one.file.path: self._obstacle(one.file.path, known) for one in wanted}
        if in_the_way := [name for name, obstacle in obstacles.items() if obstacle]:
            what = f"{listed(in_the_way)}; {obstacles[in_the_way[0]]} exists there"
            self._note(f"not copied to node {self._node}: {what}")
        left = [one for one in wanted if not obstacles[one.file.path]]
        size, free = sum(one.file.size for one in left), shutil.disk_usage(self._project).free
        if size <= free / 2:
            return left
        what = f"{listed([one.file.path for one in left])}, {size / 1e6:,.1f} MB"
        self._note(f"not copied to node {self._node}: {what}; {free / 1e6:,.1f} MB are free there")
        return []

    def _obstacle(self, name: str, known: Results) -> str:
        """Return what is in the place of a file, as a path in the project; '' for nothing, or a copy of
        it."""
        for parent in map(str, reversed(Path(name).parents)):
            path = self._project / parent
            if parent != "." and os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
                return parent
        path = self._project / name
        return name if os.path.lexists(path) and not known.origin(name, os.lstat(path)) else ""

    def _note_differences(self, usable: Mapping[int, SharedFiles]) -> None:
        """Note what is not the same on all nodes although it is not copied."""
        known = {one: {*offer.beyond, *(file.path for file in offer.files)} for one, offer in usable.items()}
        own = usable[self._node]
        if lacked := [name for name in own.beyond if not all(name in names for names in known.values())]:
            what = ", ".join(filter(is_checkpoint, lacked)) or listed(lacked)
            self._note(
                f"node {self._node}: not copied to other nodes: {what}. The limits are "
                f"[job] share_mb = {self._search.limit / 2**20:g} and {MAX_SHARED:,} files; name what all "
                "ranks read in [job] share"
            )
        if self._node == min(usable) and (names := differing(usable)):
            self._note(
                f"each node keeps its own version: {listed(names)}. If all ranks read the newest one, "
                "name it in [job] share"
            )
        for node, instance in self._ids.items():
            if stale := [
                one.path for one in own.files if one.origin == instance and one.path not in known[node]
            ]:
                what = f"copies of files that node {node} no longer has"
                self._note(f"node {self._node} has {what}: {listed(stale)}")

    # -- sending and receiving -------------------------------------------------------------------------------

    def _give(self, link: Link) -> None:
        """Send the files that a node of the job asks for. One that does not get them says so itself."""
        self._wait(lambda: self._files is not None)
        self._exchange.give(link, self._files or ())

    def _get(self, wanted: list[Copy]) -> None:
        """Get files in rounds. A node waits for nodes with lower numbers only, so never in a circle."""
        sources = []
        for (holders, lacking), group in _grouped(wanted).items():
            turns = rounds(holders, lacking)
            at = next(number for number, one in enumerate(turns) if self._node in one)
            source = turns[at][self._node]
            served = {one for one, other in turns[at - 1].items() if other == source} if at else set()
            sources.append((served | {source}.difference(holders), source, group))
        known, taken = records.results(self._project).copies, set[str]()
        records.keep_copies(self._project, {one.file.path: self._origin(one) for one in wanted})
        try:
            for before, source, group in sorted(sources, key=lambda one: (len(one[0]), one[1])):
                self._wait(functools.partial(self._ready.issuperset, before))
                self._get_files(group, source, taken)
            self._exchange.forget_begun()
        finally:
            if left := {one.file.path for one in wanted}.difference(taken):
                records.keep_copies(self._project, {name: known.get(name) for name in left})

    def _origin(self, copy: Copy) -> Writer:
        """Return where a file comes from. One that this node wrote is no copy for a pull."""
        file, parts = copy.file, self._offers[copy.holders[0]].parts
        writer = "" if file.origin == self._ids[self._node] else file.origin
        return Writer(writer, *writer_of(file.path, parts), file.size, file.mtime_ns)

    def _get_files(self, group: list[Copy], source: int, taken: set[str]) -> None:
        """Get files from a node, and what does not come from there from the one that counts as their
        writer. Raises LinkError."""
        missing, failed = {one.file.path for one in group}, ""
        for node in dict.fromkeys((source, group[0].holders[0])):
            if missing:
                failed = ""
                try:
                    self._get_from(node, missing, taken)
                except REFUSED as error:
                    failed = f"files were not copied from node {node}: {error}"
                missing -= taken
        if missing and failed:
            raise LinkError(failed)
        for name in sorted(missing):
            self._note(f"node {node}: {name} is damaged, or no longer exists; it was not copied")

    def _get_from(self, node: int, names: set[str], taken: set[str]) -> None:
        """Connect, again while strangers take the connections of that node. Raises what REFUSED names."""
        peer = replace(self._peers[node], port=self._offers[node].port)
        self._link = link = Link.within(CONNECT, peer, self._secret, PURPOSE, ended=lambda: self._closed)
        with contextlib.closing(link):
            if self._closed:
                link.end()
            link.patience = LONGEST  # the node may first look whether a large file is damaged
            self._exchange.get(link, self._files or (), names, taken)


def _grouped(planned: Iterable[Copy]) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[Copy]]:
    """Return what is copied by the nodes that have and lack it."""
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Copy]] = {}
    for one in planned:
        groups.setdefault((one.holders, one.lacking), []).append(one)
    return groups

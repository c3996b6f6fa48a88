"""Before ranks start: the newest snapshot, or the newest version of each shared file, is copied to the nodes
that lack it.

Where the user has named no files to share, what jobs wrote on some nodes only is copied to the others. This
is best effort: if it fails, a note is logged, and the ranks start.

Each node finds its files and tells the others, with a port at which they can get them. So every node knows
which of them are the newest, and who lacks them; those get them from the nodes that have them (node/link.py).
The ranks start once all have them. A script that sends its snapshot to all ranks by itself, as train/ does,
needs none of this.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Optional

from agent.files import records
from agent.files.checkpoints import Files
from agent.files.records import Origin
from agent.jobs import job_record
from agent.node import store
from agent.node.link import REFUSED, Link, Server
from agent.node.shared_memory import last_line
from agent.share import by_default, snapshot
from agent.sync.replaced import set_aside
from cloudddp.agent.protocol import checkpoints
from cloudddp.agent.protocol.codec import MAX_TEXT
from cloudddp.agent.protocol.file_steps import REPLACED
from cloudddp.agent.protocol.gang import Kind, Message
from cloudddp.agent.protocol.snapshots import Copy, Offer, Snapshot, SnapshotSearch, checkpoints_of, copies
from cloudddp.agent.protocol.start import StartRequest

CONNECT = 15.0  # seconds to connect to the node that has the newest snapshot
LONGEST = 3600.0  # seconds for all of it: a disk may never answer
WAIT = 2.0  # seconds for a thread to remove the file that it has begun
SHOWN = 3  # damaged snapshots that are named
PURPOSE = "spread"


class Spread:
    """The part of one node. Threads find, send and receive the files; all decisions are made by the thread
    that calls `turn`."""

    def __init__(self, request: StartRequest, search: SnapshotSearch, attempt: int) -> None:
        self._request, self._attempt = request, attempt
        self._search = search
        self._by_default = not search.patterns
        self._node = request.node
        self._peers = {peer.node: peer for peer in request.gang.peers}
        self._ids = {peer.node: peer.id for peer in request.gang.peers}
        self._offers: dict[int, Offer] = {}
        self._holders: set[int] = set()  # nodes that hold the newest one
        self._project = store.project_folder(request.project)
        self._found: Optional[Offer] = None  # by this node: what it offers
        nodes = len(request.gang.peers)
        self._server = Server(request.gang.secret, PURPOSE, nodes, self._give)
        self._link: Optional[Link] = None  # to the node that sends files to this one
        self._receiver: Optional[threading.Thread] = None
        self._has_it = False  # this node
        self._is_planned = False
        self._closed = False
        self._ends_at = float("inf")
        self._error = ""

    def start(self) -> None:
        self._ends_at = time.monotonic() + LONGEST
        threading.Thread(target=self._find, daemon=True).start()

    def act(self, node: int, message: Message) -> None:
        """Take a message of another node. It may come before the start."""
        if message.kind is Kind.SNAPSHOT and message.offer is not None:
            self._offers[node] = message.offer
        elif message.kind is Kind.COPIED:
            self._holders.add(node)

    @property
    def is_done(self) -> bool:
        """Whether every node has the newest snapshot."""
        return self._holders == self._peers.keys()

    @property
    def error(self) -> str:
        """Why this node cannot take part, in words, or ''."""
        if not self._error and time.monotonic() > self._ends_at and not self._by_default:
            return f"the newest snapshot was not on every node after {LONGEST / 60:.0f} min"
        return self._error[:MAX_TEXT]

    def _fail(self, text: str) -> None:
        if self._by_default:
            self._note(text)
        else:
            self._error = text

    def turn(self) -> Iterator[Message]:
        """Do what is due, and yield what the other nodes have to know."""
        if self._found is not None and self._node not in self._offers:
            self._offers[self._node] = self._found
            for file in self._found.files:
                self._note_damaged(file.skipped)
            usable = tuple([replace(one, skipped=()) for one in self._found.files if one.path])
            self._offers[self._node] = self._found = replace(self._found, files=usable)
            yield Message(Kind.SNAPSHOT, offer=self._found)
        if not self._is_planned and self._offers.keys() == self._peers.keys():
            self._is_planned = True
            self._copy()
        if self._by_default and not self._has_it and time.monotonic() > self._ends_at:
            self._note(f"files were not copied within {LONGEST / 60:.0f} min; the ranks start without them")
            self._has_it = True
        if self._has_it and self._node not in self._holders:
            self._holders.add(self._node)
            yield Message(Kind.COPIED)

    def close(self) -> None:
        """End what runs. A file that was begun is removed."""
        self._closed = True
        self._server.close()
        if (link := self._link) is not None:
            link.end()
        if self._receiver is not None:
            self._receiver.join(WAIT)

    # -- what is to be done ----------------------------------------------------------------------------------

    def _find(self) -> None:
        """Find the newest snapshot of this node, and listen for those that lack it."""
        try:
            records.settle(self._project)
            set_aside(self._project, Files(self._project).stale_copies())
            found = snapshot.written(self._search) if self._by_default else snapshot.named(self._search)
            older = [os.path.join(part.folder, name) for part in found.parts for name in part.older]
            if older := set_aside(self._project, older):
                self._note(
                    f"moved to {REPLACED}, since newer ones are beside them: {checkpoints.listed(older)}"
                )
                found = replace(found, files=tuple([one for one in found.files if one.path not in older]))
            if any(one.path for one in found.files) and len(self._peers) > 1:
                found = replace(found, port=self._server.listen(self._peers[self._node].address, 0))
            self._found = found
        except Exception as error:  # of which the supervisor must know, whatever it is
            self._fail(f"its files were not found: {last_line(error)}")
            if self._by_default:
                self._found = Offer(())

    def _copy(self) -> None:
        """Begin to get what this node lacks."""
        wanted = self._unnamed() if self._by_default else self._named()
        self._check_checkpoints()
        if wanted and not self._error:
            self._receiver = threading.Thread(target=self._receive, args=(wanted,), daemon=True)
            self._receiver.start()
        else:
            self._has_it = not self._error

    def _check_checkpoints(self) -> None:
        """Move an incomplete checkpoint away if an older one is complete: scripts that load the newest would
        load different ones. If none is, the ranks do not start."""
        known = checkpoints_of(self._offers)
        for folder in known.incomplete():
            is_moved = folder in known.superseded()
            if self._node == min(self._peers):
                what = f"moved to {REPLACED}" if is_moved else "not copied"
                self._note(f"{what}: {checkpoints.refusal(folder, known.problems)}")
            if is_moved and self._node in known.parts[folder]:
                self._set_aside(folder)
        fresh = not (self._attempt or self._request.resumed_from)
        if blocking := known.blocking(self._peers, fresh=fresh):
            self._error = checkpoints.refusal(blocking[0], known.problems)

    def _set_aside(self, folder: str) -> None:
        try:
            set_aside(self._project, [folder])
        except OSError as error:
            self._error = f"{folder} cannot be moved away: {error}"

    def _named(self) -> list[Copy]:
        """Return what this node lacks of the files that the user has named; none, with an error, if a node
        offers another one."""
        for node, _, why in by_default.refused(self._offers, self._search):
            self._error = f"node {node} reports its newest snapshot, and {why}: nothing was copied"
            return []
        if not any(offer.files for offer in self._offers.values()):
            if self._request.resumed_from and self._node == min(self._peers):
                self._note(f"no node has a snapshot that matches {', '.join(self._search.patterns)}")
            return []
        planned = copies(self._offers, every=self._search.every)
        self._note_copies([one for one in planned if self._node in (one.source, *one.lacking)])
        known, wanted = checkpoints_of(self._offers), [one for one in planned if self._node in one.lacking]
        for folder in {checkpoints.folder_of(one.file.path, known.parts) for one in wanted}:
            if folder is not None and self._node in known.parts[folder].keys() - known.holders(folder):
                self._set_aside(folder)  # an older one, which the newest would be mixed with
        return wanted

    def _unnamed(self) -> list[Copy]:
        """Return what this node lacks of what jobs wrote on the others."""
        try:
            plan = by_default.plan(
                self._project, self._search, self._node, self._request.gang.peers, self._offers
            )
        except OSError as error:
            self._fail(f"nothing is copied to node {self._node}: {error}")
            return []
        for note in plan.notes:
            self._note(note)
        self._note_copies(plan.wanted)
        return plan.wanted

    def _note_copies(self, planned: list[Copy]) -> None:
        """Note what is copied from this node, and to it, in one line for each pair of source and targets."""
        groups: dict[tuple[int, tuple[int, ...]], list[Snapshot]] = {}
        for one in planned:
            groups.setdefault((one.source, one.lacking), []).append(one.file)
        for (source, lacking), files in groups.items():
            size = f"{sum(one.size for one in files) / 1e6:,.1f} MB"
            several = self._search.every or self._by_default
            what = "which only some nodes have" if several else "the newest snapshot"
            where = ", ".join(map(str, lacking))
            names = checkpoints.listed([one.path for one in files])
            self._note(f"copying {names}, {size}, {what}, from node {source} to node {where}")

    def _note(self, text: str) -> None:
        job_record.note(store.job_folder(self._request.job), text)

    def _note_damaged(self, names: tuple[str, ...]) -> None:
        for name in names[:SHOWN]:
            self._note(f"node {self._node}: {name} is damaged; an older snapshot is used")

    # -- sending and receiving -------------------------------------------------------------------------------

    def _give(self, link: Link) -> None:
        """Send the files that a node of the job asks for. One that does not get them says so itself."""
        offered = {one.path: one for one in self._found.files} if self._found is not None else {}
        while name := link.read("path", LONGEST):
            is_good = False
            with contextlib.suppress(OSError):  # it has gone
                is_good = snapshot.is_as_offered(self._project, offered[name])
            link.write("answer", "send" if is_good else "")
            if is_good:
                snapshot.send(link, self._request.gang.secret, self._project, name)

    def _receive(self, wanted: list[Copy]) -> None:
        """Get these files, source by source."""
        for source in sorted({one.source for one in wanted}):
            files = [one.file for one in wanted if one.source == source]
            name = ""
            try:
                origins = self._record(source, files)
                try:
                    with contextlib.closing(self._connected(source)) as link:
                        for file in files:
                            name = file.path
                            self._receive_file(link, source, file)
                        link.write("path", "")
                finally:
                    records.add_received(self._project, records.as_written(self._project, origins))
            except (Exception, SystemExit) as error:
                if self._closed and not name:
                    return
                text = str(error) if isinstance(error, (*REFUSED, SystemExit)) else last_line(error)
                self._fail(f"{name or 'a file'} was not copied from node {source}: {text}")
                if not self._by_default:
                    return
        self._has_it = True

    def _record(self, source: int, files: list[Snapshot]) -> dict[str, Origin]:
        """Return where these files come from, which is recorded before they come. One that this node wrote
        is no copy for a pull."""
        origins, known = {}, self._offers[source].parts
        for file in files:
            origin = file.origin if file.origin in self._ids.values() else self._ids[source]
            own = origin == self._ids[self._node]
            origins[file.path] = Origin("" if own else origin, *checkpoints.writer_of(file.path, known))
        records.add_received(self._project, origins)
        return origins

    def _receive_file(self, link: Link, source: int, file: Snapshot) -> None:
        link.write("path", file.path)
        is_sent = link.read("answer", LONGEST) == "send"
        try:
            durable = not self._by_default
            is_sent = is_sent and snapshot.receive(
                link, self._request.gang.secret, self._project, file, durable=durable
            )
        except SystemExit as error:
            if not self._by_default:
                raise
            self._note(f"{file.path} was not copied from node {source}: {error}")
            return
        if not is_sent:
            self._note(f"node {source}: {file.path} is damaged, or has gone; it was not copied")

    def _connected(self, source: int) -> Link:
        """Connect to that node, again while strangers take its connections. Raises what REFUSED names."""
        peer = replace(self._peers[source], port=self._offers[source].port)
        self._link = link = Link.within(
            CONNECT, peer, self._request.gang.secret, PURPOSE, connect=CONNECT, ended=lambda: self._closed
        )
        if self._closed:
            link.end()
        return link

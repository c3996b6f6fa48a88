"""Before ranks start: the newest snapshot, or the newest version of each shared file, is copied to the nodes that lack it.

Where the user has named no files to share, what jobs wrote on some nodes only is copied to the others. That is a help: if it fails,
a note says so, and the ranks start.

Each node finds its files and tells the others, with a port at which they can get them. So every node knows which of them are the
newest, and who lacks them; those get them from the nodes that have them (link.py). The ranks start once all have them.
A script that sends its snapshot to all ranks by itself, as train/ does, needs none of this.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Optional

from agent import crash, job_record, received, snapshot, store
from agent.link import REFUSED, Link
from agent.selection import NewFile
from cloudddp.agent.protocol.codec import MAX_TEXT
from cloudddp.agent.protocol.gang import Kind, Message
from cloudddp.agent.protocol.snapshots import (
    LATEST,
    Copy,
    Offer,
    Snapshot,
    SnapshotSearch,
    copies,
    missing,
    refusal,
)
from cloudddp.agent.protocol.start import StartRequest

CONNECT = 15.0  # seconds to connect to the node that has the newest snapshot
LONGEST = 3600.0  # seconds for all of it: a disk may never answer
MAX_STRANGERS = 64  # connections at a time, besides those of the nodes
WAIT = 2.0  # seconds for a thread to remove the file that it has begun
SHOWN = 3  # damaged snapshots that are named
PAUSE = 0.2
PURPOSE = "spread"


class Spread:
    """The part of one node. Threads find, send and receive the snapshot; all else is done by the thread that calls `turn`."""

    def __init__(self, request: StartRequest, search: SnapshotSearch) -> None:
        self._request = request
        self._search = search
        self._by_default = not search.patterns
        self._node = request.node
        self._peers = {peer.node: peer for peer in request.gang.peers}
        self._offers: dict[int, Offer] = {}
        self._holders: set[int] = set()  # nodes that hold the newest one
        self._project = store.project_folder(request.project)
        self._found: Optional[Offer] = None  # by this node: what it offers
        self._listener: Optional[socket.socket] = None
        self._links: set[Link] = set()
        self._lock = threading.Lock()  # of _links and _closed
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
        if not self._error and time.monotonic() > self._ends_at:
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
        if self._by_default and time.monotonic() > self._ends_at:
            self._has_it = True
        if self._has_it and self._node not in self._holders:
            self._holders.add(self._node)
            yield Message(Kind.COPIED)

    def close(self) -> None:
        """End what runs. A file that was begun is removed."""
        with self._lock:
            self._closed = True
            links = list(self._links)
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        for link in links:
            link.end()
        if self._receiver is not None:
            self._receiver.join(WAIT)

    # -- what is to be done ------------------------------------------------------------------------------------

    def _find(self) -> None:
        """Find the newest snapshot of this node, and listen for those that lack it."""
        try:
            search = self._search
            if self._by_default:
                found, beyond = snapshot.written(search)
                self._note_beyond(beyond)
            else:
                found = snapshot.every(search) if search.every else (snapshot.newest(search),)
            port = 0
            if any(one.path for one in found) and len(self._peers) > 1:
                self._listener = socket.socket()
                self._listener.bind((self._peers[self._node].address, 0))
                self._listener.listen(len(self._peers) + MAX_STRANGERS)
                port = self._listener.getsockname()[1]
                threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()
            self._found = Offer(tuple(found), port)
        except Exception as error:  # of which the supervisor must know, whatever it is
            self._fail(f"its files were not found: {crash.last_line(error)}")
            self._found = Offer(())

    def _copy(self) -> None:
        """Begin to get what this node lacks."""
        latest = (time.time() + LATEST) * 1e9
        for node, offer in sorted(self._offers.items()):
            for file in offer.files:
                if why := refusal(file, self._search, latest):
                    self._fail(f"node {node} reports its newest snapshot, and {why}: nothing was copied")
                    self._has_it = self._by_default
                    return
        if not any(offer.files for offer in self._offers.values()):
            self._has_it = True
            if self._search.patterns and self._request.resumed_from and self._node == min(self._peers):
                self._note(f"no node has a snapshot that matches {', '.join(self._search.patterns)}")
            return
        if self._by_default:
            ids = {node: peer.id for node, peer in self._peers.items()}
            planned = [one for one in missing(self._offers, ids) if self._may_take(one)]
        else:
            planned = copies(self._offers, every=self._search.every)
        self._note_copies([one for one in planned if self._node in (one.source, *one.lacking)])
        wanted = [one for one in planned if self._node in one.lacking]
        if not wanted:
            self._has_it = True
            return
        self._receiver = threading.Thread(target=self._receive, args=(wanted,), daemon=True)
        self._receiver.start()

    def _may_take(self, copy: Copy) -> bool:
        """Whether nothing here is in the way of a file that this node lacks, but an older copy of it."""
        if self._node not in copy.lacking:
            return True
        path = self._project / copy.file.path
        parents = [self._project / one for one in Path(copy.file.path).parents]
        blocked = [one for one in parents if os.path.lexists(one) and (one.is_symlink() or not one.is_dir())]
        if not blocked and (not os.path.lexists(path) or self._is_copy(copy.file.path, path)):
            return True
        self._note(
            f"{copy.file.path} of node {copy.source} is not copied to node {self._node}: {(blocked or [path])[0].name} is there"
        )
        return False

    def _is_copy(self, name: str, path: Path) -> bool:
        return bool(received.unchanged(self._project).origin(name, os.lstat(path)))

    def _note_copies(self, planned: list[Copy]) -> None:
        """Note what is copied from this node, and to it, in one line for each pair of source and targets."""
        groups: dict[tuple[int, tuple[int, ...]], list[Snapshot]] = {}
        for one in planned:
            groups.setdefault((one.source, one.lacking), []).append(one.file)
        for (source, lacking), files in groups.items():
            size = f"{sum(one.size for one in files) / 1e6:,.1f} MB"
            more = f" and {len(files) - 1} more file{'s' * (len(files) > 2)}" if len(files) > 1 else ""
            what = "the newest snapshot"
            if self._search.every or self._by_default:
                what = "which only some nodes have"
            where = ", ".join(map(str, lacking))
            self._note(f"copying {files[0].path}{more}, {size}, {what}, from node {source} to node {where}")

    def _note(self, text: str) -> None:
        job_record.note(store.job_folder(self._request.job), text)

    def _note_damaged(self, names: tuple[str, ...]) -> None:
        for name in names[:SHOWN]:
            self._note(f"node {self._node}: {name} is damaged; an older snapshot is used")

    def _note_beyond(self, files: list[NewFile]) -> None:
        if files:
            size = f"{sum(one.size for one in files) / 1e6:,.1f} MB"
            more = f" and {len(files) - 1} more file{'s' * (len(files) > 2)}" if len(files) > 1 else ""
            self._note(
                f"node {self._node}: {files[0].found.name}{more}, {size}, is not copied to other nodes: more than job.share_mb = "
                f"{self._search.limit >> 20}; name what the ranks read in job.share"
            )

    # -- sending and receiving ---------------------------------------------------------------------------------

    def _open(self, connection: socket.socket) -> Optional[Link]:
        """Return the link of a connection, or None, with the connection closed, where none is wanted any more."""
        link = Link(connection, self._request.gang.secret, PURPOSE)
        with self._lock:
            if not self._closed and len(self._links) < len(self._peers) + MAX_STRANGERS:
                self._links.add(link)
                return link
        link.close()
        return None

    def _forget(self, link: Link) -> None:
        with self._lock:
            self._links.discard(link)
        link.close()

    def _serve(self, listener: socket.socket) -> None:
        """Accept connections until this is closed."""
        with listener, contextlib.suppress(OSError):
            while not self._closed:
                accepted, _ = listener.accept()
                link = self._open(accepted)
                if link is not None:
                    threading.Thread(target=self._give, args=(link,), daemon=True).start()

    def _give(self, link: Link) -> None:
        """Send the files that a node of the job asks for. One that does not get them says so itself."""
        try:
            link.accept()
            offered = {one.path: one for one in self._found.files} if self._found is not None else {}
            while name := link.read("path", LONGEST):
                file = offered[name]
                path = self._project / name
                is_valid = bool(file.digest) or snapshot.is_valid(path)
                link.write("digest", (file.digest or snapshot.digest(path)) if is_valid else "")
                if is_valid:
                    link.send(path, file.size)
        except REFUSED:
            pass  # a stranger, or a node that was lost
        finally:
            self._forget(link)

    def _receive(self, wanted: list[Copy]) -> None:
        """Get these files, source by source."""
        for source in sorted({one.source for one in wanted}):
            name = ""
            copied: dict[str, str] = {}
            try:
                link = self._connected(source, self._offers[source].port)
                if link is None:
                    return
                try:
                    for one in wanted:
                        if one.source == source:
                            name = one.file.path
                            self._receive_file(link, source, one.file, copied)
                    link.write("path", "")
                finally:
                    self._forget(link)
                    if copied:
                        received.add(self._project, copied)
            except (Exception, SystemExit) as error:
                text = str(error) if isinstance(error, (*REFUSED, SystemExit)) else crash.last_line(error)
                self._fail(f"{name or 'a file'} was not copied from node {source}: {text}")
                if not self._by_default:
                    return
        self._has_it = True

    def _receive_file(self, link: Link, source: int, file: Snapshot, copied: dict[str, str]) -> None:
        """Get a file. One that another node wrote is added to `copied`, with that node's instance."""
        link.write("path", file.path)
        digest = link.read("digest", LONGEST)
        if digest:
            snapshot.write(self._request.project, replace(file, digest=digest), link.receive)
            ids = [peer.id for peer in self._peers.values()]
            origin = file.origin if file.origin in ids else self._peers[source].id
            if origin and origin != self._peers[self._node].id:
                copied[file.path] = origin
        else:
            self._note(f"node {source}: {file.path} is damaged; it was not copied")

    def _connected(self, source: int, port: int) -> Optional[Link]:
        """Connect to that node, again while strangers take its connections. Return None after `close`. Raises what REFUSED
        names."""
        deadline = time.monotonic() + CONNECT
        while True:
            link = None
            try:
                link = self._open(socket.create_connection((self._peers[source].address, port), CONNECT))
                if link is not None:
                    link.connect()
                return link
            except REFUSED:
                if link is not None:
                    self._forget(link)
                if self._closed or time.monotonic() > deadline:
                    raise
            time.sleep(PAUSE)

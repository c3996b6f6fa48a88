"""What a transfer knows of its nodes, and what it does about what they report and do not report. Pure:
`take`, `finish` and `tick` get the time, and return actions for transfer.py.

The first node gets the files from this computer and serves the others; these get them from this computer if
that fails. Progress is a further stage (each is reached once), or more bytes that were received, hashed or
written: any program of a node's login user may send reports without either.

A node may make no progress without a fault of its own:

- It waits for the first node, which has received nothing that this one lacks. Then that node is judged
  instead.
- The first node sends it nothing, although it has more, or claims to have everything. Then it gets the files
  from this computer, which is trusted. A node that gets nothing from here either is at fault.
- This computer is busy: it hashes the part of a large file that a node has, or reads from a slow disk. That
  time does not count.
- Its disk is slow: it waits until what was written is on it. That has a longer limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.file_steps import COMPARED, WAITING, WRITING, ReceiveEvent
from cloudddp.agent.protocol.manifest import Entry
from cloudddp.agent.protocol.transfer import Wants
from cloudddp.text import one_line

# Seconds without progress.
BYPASS = 30.0  # until a node gets the files from here; another sync of the project may hold it up for 20 s
# until a node is given up, for each of the nodes that get files from this computer at the same time
STALLED = 120.0
TO_DISK = 900.0  # the same while it waits for its disk: many GB may be in its memory
CLOSING = 30.0  # seconds for a step to end, once its stdin has


class Offer(NamedTuple):
    """Send the listing to a node, which gets the files from this computer from now on."""

    rank: int


class Send(NamedTuple):
    """Send files by their index, each from an offset on. `wants`: all that the node lacks, to approve."""

    rank: int
    files: list[tuple[int, int]]
    wants: Wants | None = None


class Note(NamedTuple):
    """Tell the user."""

    text: str


class GiveUp(NamedTuple):
    """Do not wait for a node any more."""

    rank: int
    why: str


class Close(NamedTuple):
    """End the steps of all nodes."""


Action = Offer | Send | Note | GiveUp | Close


@dataclass(slots=True)
class NodeState:
    """How far one node is, by what it has reported."""

    rank: int
    has_begun: bool = False  # its step was started
    is_direct: bool = False  # it gets the files from this computer
    is_offered: bool = False  # it was sent the listing, and has not asked for files
    has_complained: bool = False  # it has asked for the files from this computer
    continued: frozenset[int] = frozenset()  # the files of which it has a beginning
    heard: float = 0.0  # when it reported last
    progressed: float = 0.0  # when it last made progress
    received: int = 0  # bytes
    worked: int = 0  # bytes that it has hashed or written, as far as it reports that
    stage: int = WAITING
    ended: bool = False  # it needs nothing more
    finished: bool = False  # its result is known
    given_up: bool = False

    def count(self, event: ReceiveEvent, now: float) -> None:
        """Note a report."""
        self.heard = now
        is_more = event.received > self.received or event.worked > self.worked
        if event.stage > self.stage or (is_more and self.stage < WRITING):  # to the disk: within TO_DISK
            self.progressed = now
        self.stage = max(self.stage, event.stage)
        self.received = max(self.received, event.received)
        self.worked = max(self.worked, event.worked)


class TransferState:
    """The nodes by rank; the first of `ranks` serves the others. `entries`: of the listing."""

    def __init__(self, ranks: Sequence[int], entries: list[tuple[str, Entry]]) -> None:
        self._entries = entries
        self.nodes = {rank: NodeState(rank) for rank in ranks}
        self.first = self.nodes[ranks[0]]
        self._is_explained = False
        self._closed: float | None = None  # when all steps were asked to end

    def offer(self, node: NodeState, now: float) -> Offer:
        node.is_direct = node.is_offered = True
        node.progressed = now
        return Offer(node.rank)

    def begin(self, rank: int, now: float) -> None:
        node = self.nodes[rank]
        node.has_begun, node.heard, node.progressed = True, now, now

    def restart_limits(self, now: float) -> None:
        """Give the nodes time: this computer has been busy, so they could make no progress."""
        for node in self.nodes.values():
            node.heard = node.progressed = now

    def take(self, rank: int, event: ReceiveEvent, now: float) -> list[Action]:
        """Return what follows from a report. Raises ProtocolError for more than a node may ask for."""
        node, actions = self.nodes[rank], list[Action]()
        if node.finished:
            raise ProtocolError("its step goes on")
        node.count(event, now)
        if event.wants is not None:
            actions.append(self._send(node, event.wants))
        if event.again:
            actions.append(self._send_again(node, event.again))
        if event.direct or event.note:
            actions.append(Note(f"node {rank}: {one_line(event.direct or event.note, 300)}"))
        if event.direct:
            actions += self._send_directly(node, event.direct, now)
        if event.done is not None:
            actions += self._end(node, now)
        return actions

    def finish(self, rank: int, now: float) -> list[Action]:
        """Note that the result of a node is known: a step that was given up may end later."""
        self.nodes[rank].finished = True
        return self._end(self.nodes[rank], now)

    def close(self, now: float) -> list[Action]:
        if self._closed is not None:
            return []
        self._closed = now
        return [Close()]

    def tick(self, now: float) -> list[Action]:
        """Return what is done about nodes that make no progress, or whose steps do not end."""
        actions: list[Action] = []
        if self._closed is not None:
            late = [one for one in self.nodes.values() if now - self._closed >= CLOSING and not one.finished]
            for node in late:
                actions += self._give_up(node, f"its step did not end within {CLOSING:g} s", now)
            return actions
        direct = sum(one.is_direct and not one.ended for one in self.nodes.values())
        for node in self.nodes.values():
            if node.ended or not node.has_begun:
                continue
            waited = now - node.progressed
            if self._is_waiting(node):
                node.progressed = now
            elif not node.is_direct and node.stage in (WAITING, COMPARED):
                if waited >= BYPASS or self.first.given_up:
                    text = f"node {node.rank} receives nothing from its source; it uses another source"
                    actions += [Note(text), self.offer(node, now)]
            elif waited >= (TO_DISK if node.stage == WRITING else STALLED * max(direct, 1)):
                actions += self._give_up(node, "it made no progress while files were sent to it", now)
        return actions

    def _is_waiting(self, node: NodeState) -> bool:
        """Return whether a node waits for the first one, which has nothing new for it."""
        first = self.first
        if node.is_direct or first.ended:
            return False
        if node.stage == WAITING:
            return first.stage == WAITING
        return node.stage == COMPARED and first.received <= node.received

    def _give_up(self, node: NodeState, why: str, now: float) -> list[Action]:
        node.given_up = True
        return [GiveUp(node.rank, why), *self.finish(node.rank, now)]

    def _end(self, node: NodeState, now: float) -> list[Action]:
        """Note that a node needs nothing more. The last one ends the steps of all: until then the first
        serves."""
        node.ended = True
        return self.close(now) if all(one.ended for one in self.nodes.values()) else []

    def _send(self, node: NodeState, wants: Wants) -> Send:
        """Send what a node lacks: it asks once, for the listing that it got from here."""
        if not node.is_offered:
            raise ProtocolError("it asks for files that were not offered")
        node.is_offered = False
        files = wants.of(self._entries)  # raises ProtocolError for what was not listed
        node.continued = frozenset(index for index, offset in files if offset)
        return Send(node.rank, files, wants)

    def _send_again(self, node: NodeState, indexes: Sequence[int]) -> Send:
        """Send files as a whole whose partial file on a node was corrupt: each of those that it continued,
        once."""
        if not node.continued.issuperset(indexes) or len(set(indexes)) < len(indexes):
            raise ProtocolError("it asks again for a file that was sent as a whole")
        node.continued -= frozenset(indexes)
        return Send(node.rank, [(index, 0) for index in indexes])

    def _send_directly(self, node: NodeState, reason: str, now: float) -> list[Action]:
        """Send the files to a node that cannot get them from the first one."""
        if node.has_complained or node is self.first:
            raise ProtocolError("it asks again to get the files from this computer")
        node.has_complained = True
        actions: list[Action] = [] if node.is_direct else [self.offer(node, now)]
        if not self._is_explained:
            self._is_explained = True
            text = f"nodes cannot copy files from each other ({one_line(reason, 300)})"
            actions.insert(0, Note(f"warning: {text}; sending from this computer"))
        return actions

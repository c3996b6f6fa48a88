"""How far the nodes of a transfer are, by what they report, and which of them make no progress.

Reports alone are no progress: any program of a node's login user may send them. Progress is a further stage
(each is reached once), or LEAST bytes that were received, hashed or written. The bytes that count are limited
by the size of what is sent, so no node can make a transfer last without limit.

A node may make no progress without a fault of its own:

- It waits for a node that has received nothing that this one lacks. Then that node is judged instead.
- Its source sends it nothing, although it has more, or claims to have everything. Then it gets another
  source: that of the source, and after that this computer, which is trusted. A node that gets nothing from
  here either is at fault.
- This computer is busy: it hashes the part of a large file that a node has, or reads from a slow disk. That
  time does not count.
- Its disk is slow: it waits until what was written is on it. That has a longer limit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from cloudddp.agent.protocol.manifest import Entry
from cloudddp.agent.protocol.receive import COMPARED, WAITING, WRITING, ReceiveEvent
from cloudddp.agent.protocol.transfer import FILE_WORK, LAPTOP

# Seconds without progress.
BYPASS = 30.0  # until a node gets another source; another sync of the project may hold it up for 20 s
# until a node is given up, for each of the nodes that get files from this computer at the same time
STALLED = 120.0
TO_DISK = 900.0  # the same while it waits for its disk: many GB may be in its memory
LEAST = 256 << 10  # bytes that are progress

TIMES_READ = 4  # how often a file may be sent and written: one that changes is read up to 3 times

# A node has fallen behind when the node before it has so many bytes more, and gets them so many times faster.
BEHIND = 32 << 20
FACTOR = 4
RATE_SECONDS = 3.0  # over which rates are measured


@dataclass(slots=True)
class Progress:
    """How far one node of the chain is, by what it has reported."""

    rank: int
    position: int
    source: int  # the position of the node that it gets the files from, or LAPTOP
    received: deque[tuple[float, int]] = field(default_factory=lambda: deque([(time.monotonic(), 0)]))
    began: float | None = None  # when its step was started
    heard: float = 0.0  # when it reported last
    progressed: float = 0.0  # when it last made progress
    worked: int = 0  # bytes that it has hashed or written, as far as it reports that
    counted: int = 0  # bytes of all its work when it last made progress
    stage: int = WAITING
    moves: int = 0  # how often it got another source because it made no progress
    deletes: int = 0  # files that it has to delete
    ended: bool = False  # it needs nothing more
    avoided: bool = False  # the nodes after it use another one

    @property
    def bytes(self) -> int:
        return self.received[-1][1]

    def rate(self, now: float) -> float | None:
        """Return bytes per second in the last RATE_SECONDS, None before."""
        first, begin = self.received[0]
        return (self.bytes - begin) / (now - first) if now - first >= RATE_SECONDS else None

    def count(self, received: int, now: float) -> None:
        """Note how many bytes it has received, for its rate."""
        self.received.append((now, received))
        while len(self.received) > 1 and now - self.received[1][0] >= RATE_SECONDS:
            self.received.popleft()

    def begin(self, now: float) -> None:
        """Note that its step has been started."""
        self.began = self.heard = self.progressed = now

    def take(self, event: ReceiveEvent, now: float, most: int) -> None:
        """Note a report. `most`: how many bytes of work can be progress."""
        self.heard = now
        if event.stage > self.stage:
            self.stage, self.progressed = event.stage, now
        self.worked = max(self.worked, event.worked)
        work = min(max(event.received, self.bytes) + self.worked, most + FILE_WORK * self.deletes)
        if work >= self.counted + LEAST and self.stage < WRITING:  # to the disk: all of it within TO_DISK
            self.counted, self.progressed = work, now


class Stall(Enum):
    """What is done about a node that makes no progress."""

    MOVE = auto()  # it gets another source
    GIVE_UP = auto()


def stalled(nodes: Iterable[Progress], now: float) -> list[tuple[Progress, Stall]]:
    """Return the nodes that make no progress. Those that wait for another one without new files get the full
    time again."""
    by_position = {one.position: one for one in nodes}
    direct = sum(one.source == LAPTOP and not one.ended for one in by_position.values())
    found = []
    for node in by_position.values():
        if node.ended or node.began is None:
            continue
        if _is_waiting(node, by_position.get(node.source)):
            node.progressed = now
        elif now - node.progressed >= _limit(node, direct):
            found.append((node, Stall.MOVE if _can_move(node) else Stall.GIVE_UP))
    return found


def _is_waiting(node: Progress, source: Progress | None) -> bool:
    """Return whether a node waits for another one that has nothing new for it."""
    if source is None or source.ended:
        return False
    if node.stage == WAITING:
        return source.stage == WAITING
    return node.stage == COMPARED and source.bytes <= node.bytes


def _can_move(node: Progress) -> bool:
    return node.source != LAPTOP and node.stage in (WAITING, COMPARED)


def _limit(node: Progress, direct: int) -> float:
    if node.stage == WRITING:
        return TO_DISK
    return BYPASS if _can_move(node) else STALLED * max(direct, 1)


def next_source(node: Progress, chain: Sequence[Progress]) -> int:
    """Return where a node that gets nothing from its source gets the files instead: from another node once,
    and then from here. `chain`: all nodes, by position."""
    return LAPTOP if node.source == LAPTOP or node.moves else chain[node.source].source


def most_work(entries: Sequence[tuple[str, Entry]]) -> int:
    """Return how many bytes a node may have to receive, hash and write."""
    return TIMES_READ * sum(entry.size + FILE_WORK for _, entry in entries) + LEAST


def fallen_behind(nodes: Sequence[Progress], now: float) -> list[Progress]:
    """Return the nodes that hold up the ones after them."""
    by_position = {one.position: one for one in nodes}
    return [
        one
        for one in nodes
        if not (one.avoided or one.ended)
        and (before := by_position.get(one.source)) is not None
        and before.bytes - one.bytes > BEHIND
        and (rate := one.rate(now)) is not None
        and (before.ended or (before.rate(now) or 0.0) > FACTOR * rate)
    ]

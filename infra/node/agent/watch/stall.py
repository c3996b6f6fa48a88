"""A job that does nothing: noticed when every node is idle, its stacks gathered, the cause put into a
sentence.

Each agent sends in its heartbeats for how long its ranks have been idle. The first node declares the stall;
all nodes read the stacks of their ranks, and send what they found.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Callable, Optional

from agent.jobs import job_record
from agent.ranks.causes import end_of_log
from agent.watch import stacks
from agent.watch.activity import Activity
from agent.watch.gpus import Gpus
from cloudddp.agent.protocol.codec import MAX_TEXT
from cloudddp.agent.protocol.gang import Kind, Message, Observed
from cloudddp.agent.protocol.jobs import MAX_AGO, Cause, Failure
from cloudddp.agent.protocol.progress import LeftStall
from cloudddp.agent.protocol.stacks import StacksReply, elsewhere, summary

Send = Callable[[Message], None]
GATHER_SECONDS = 120.0  # for all nodes to report their stacks


class Stall:
    """The watch over one attempt of a job, on one node. What the other nodes have to know, it will `send`."""

    def __init__(self, node: int, folder: Path, minutes: float, gpus: Gpus, send: Send) -> None:
        self._node, self._folder, self._send = node, folder, send
        self._limit = minutes * 60.0
        self._activity = Activity(folder, self._limit, gpus)
        self._idle: dict[int, float] = {}  # of the other nodes
        self._declared_at: Optional[float] = None
        self._thread: Optional[threading.Thread] = None
        self._own: Optional[Message] = None
        self._found: dict[int, Message] = {}  # by node: where its ranks are, and what NCCL reports
        self._concluded = False
        self._left: Optional[LeftStall] = None  # the stall that goes on

    def idle(self) -> float:
        """Return for how many seconds this node's ranks have done nothing."""
        return min(self._activity.idle(), MAX_AGO)

    def heard_idle(self, node: int, seconds: float) -> None:
        self._idle[node] = seconds

    def add_stacks(self, node: int, found: Message) -> None:
        self._found[node] = found

    def look(self, others: Optional[Collection[int]]) -> None:
        """Notice that no rank of any node does anything; say once where this node's ranks are. The first node
        declares a stall: `others` are the other nodes that are left; None: it is not this node, or all ranks
        have finished."""
        if others is not None and self._is_due(others):
            self.gather()
            self._send(Message(Kind.STALLED))
        found, self._own = self._own, None
        if found is not None:
            self._found[self._node] = found
            self._send(found)

    def _is_due(self, others: Collection[int]) -> bool:
        """Whether this node has to declare a stall: all nodes are idle. After one that was left alone, the
        next is due when there was activity in between."""
        idle = min([self.idle(), *(self._idle.get(node, 0.0) for node in others)])
        if self._concluded and idle < self._limit:
            self._declared_at, self._concluded = None, False
            if self._left is not None:
                self._keep(replace(self._left, until=max(time.time(), self._left.since)))
                self._left = None
        return 0 < self._limit <= idle and self._declared_at is None

    def gather(self) -> None:
        """Read the stacks of this node's ranks, in a thread."""
        self._declared_at = time.monotonic()
        self._found = {}
        self._thread = threading.Thread(target=self._gather, daemon=True)
        self._thread.start()

    def _gather(self) -> None:
        found = StacksReply(())
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no thread can be started
            found = stacks.gather(self._folder)
        positions = tuple(one.position for one in found.ranks)
        self._own = Message(Kind.STACKS, stacks=positions, nccl=found.nccl)

    def leave(self, detail: str) -> None:
        """Keep, here and on the other nodes, that a stall is left alone."""
        self._left = LeftStall(time.time(), detail)
        self._keep(self._left)

    def _keep(self, stall: LeftStall) -> None:
        job_record.keep_stall(self._folder, stall)
        self._send(Message(Kind.LEFT, stall=stall))

    def noted(self) -> None:
        """The agent has written into the logs."""
        self._activity.forget_output()

    def conclusion(self, nodes: AbstractSet[int]) -> Optional[Observed]:
        """Return the stall as a failure, once, when all nodes have reported their stacks, or have had the
        time to."""
        if self._declared_at is None or self._concluded:
            return None
        if not nodes <= self._found.keys() and time.monotonic() - self._declared_at < GATHER_SECONDS:
            return None
        self._concluded = True
        known = {one.rank: node for node, found in self._found.items() for one in found.stacks}
        positions = [one for found in self._found.values() for one in found.stacks]
        alone = elsewhere(positions)
        node = self._node if alone is None else known[alone.rank]
        waited = f"{self._limit / 60:g} min" if self._limit >= 60 else f"{self._limit:g} s"
        detail = f"no output, CPU or GPU activity of any rank for {waited}"
        nccl = next((found.nccl for found in self._found.values() if found.nccl), "")
        detail = "; ".join(filter(None, (detail, summary(positions), nccl)))
        failure = Failure(
            node, Cause.STALL, rank=None if alone is None else alone.rank, detail=detail[:MAX_TEXT]
        )
        lines = () if alone is None else end_of_log(self._folder / "ranks" / f"{alone.rank}.log")[0]
        return Observed(failure, 0.0, lines)

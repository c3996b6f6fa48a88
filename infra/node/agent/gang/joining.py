"""The beginning of a job on a node: connect to all other nodes, compare what they are like, or give up."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Callable, Optional

from agent.gang import preflight
from agent.gang.peers import Peers
from agent.node import store
from agent.node.commands import program
from cloudddp.agent.protocol.codec import MAX_TEXT
from cloudddp.agent.protocol.gang import MAX_FACT, MAX_PROBLEMS, Facts, Kind, Message, Unreachable
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import StartRequest
from cloudddp.agent.protocol.verdict import MAX_LINE, Cause, Failure, Verdict

PATIENCE = 5.0  # seconds after the limit, for the nodes that know what is missing to say so


class Joining:
    """Connects this node to all others. What the node is like is collected meanwhile, by a thread, which
    calls `on_facts`."""

    def __init__(self, request: StartRequest, peers: Peers, *, on_facts: Callable[[], object]) -> None:
        self._request = request
        self._peers = peers
        self._on_facts = on_facts
        self._announced = False
        self._found: Optional[Facts] = None
        self.deadline = time.monotonic() + request.gang.join
        if not request.gang.preflight:
            self._found = Facts()
            return
        python = program(request.program, store.project_folder(request.project))
        threading.Thread(target=self._collect, args=(python,), daemon=True).start()

    def _collect(self, python: str) -> None:
        problems: list[str] = []
        copying = threading.Thread(target=lambda: problems.append(self._cannot_copy()), daemon=True)
        copying.start()
        try:
            found = preflight.facts(python, Path.home())
            copying.join()
            defects = [one[:MAX_FACT] for one in problems if one]
            self._found = replace(found, defects=(*found.defects, *defects))
        finally:
            self._found = self._found or Facts()
            with contextlib.suppress(OSError):  # the socket is full, or closed
                self._on_facts()

    def _cannot_copy(self) -> str:
        if self._request.results is None:
            return ""
        from agent.s3 import copies  # 35 ms, which a job without results in S3 need not take

        return copies.check(self._request)

    @property
    def is_done(self) -> bool:
        """Whether every node is connected to all others, and has said what it is like."""
        return self._announced and self._peers.ready == self._peers.others

    @property
    def is_late(self) -> bool:
        patience = PATIENCE if self._peers.is_connected else 0.0
        is_first = self._request.node == min(self._peers.nodes)
        return time.monotonic() > self.deadline + (patience if is_first else 2 * patience)

    def announce(self) -> None:
        """Tell the others, once, that this node is connected to all of them, and what it is like."""
        if self._announced or self._found is None or not self._peers.is_connected:
            return
        self._announced = True
        self._peers.facts[self._request.node] = self._found
        self._peers.send(Message(Kind.READY, facts=self._found, clock=time.time()))

    def problems(self) -> tuple[str, ...]:
        """Return why the ranks should not start although all nodes are connected."""
        if not self._request.gang.preflight:
            return ()
        found = preflight.problems(self._request.node, self._peers.facts, self._peers.skews)
        return tuple(one[:MAX_LINE] for one in found[:MAX_PROBLEMS])

    def give_up(
        self, given: Optional[Verdict], *, asked: str, problems: tuple[str, ...]
    ) -> tuple[Unreachable, Verdict]:
        """Return why no rank is started on this node: for the reply of `start`, and as a verdict. `given`:
        that of a node that has given up before, if any. `asked`: why this process was asked to end, or ''."""
        missing = replace(self._peers.missing, problems=problems)
        if given is not None:
            return missing, given
        if asked:
            failure = Failure(self._request.node, Cause.AGENT, detail=asked)
            return missing, Verdict(JobPhase.FAILED, 1, self._request.node, failure, at=time.time())
        return self._failed(problems)

    def _failed(self, problems: tuple[str, ...]) -> tuple[Unreachable, Verdict]:
        node, missing = self._request.node, self._peers.missing
        losses = self._peers.losses
        apart = [*missing.to, *missing.by]
        # A node that has ended is the cause, unless it has given up because of a connection that only this
        # node misses.
        peer = next((one for one in apart if one in self._peers.lost or not losses), None)
        if not problems and peer is None and not losses:
            unready = ", ".join(map(str, self._unready()))
            problems = (f"node {unready} was not ready in time (does nvidia-smi answer there?)",)
        if problems:
            first = Failure(node, Cause.PREFLIGHT, detail="; ".join(problems)[:MAX_TEXT])
        elif peer is not None:
            first = Failure(node, Cause.UNREACHABLE, detail=missing.to.get(peer, ""), peer=peer)
        else:
            first = losses[0].observed.failure
        return replace(missing, problems=problems), Verdict(JobPhase.FAILED, 1, node, first, at=time.time())

    def _unready(self) -> list[int]:
        """The nodes that are not yet connected to all others, or have not said what they are like. It may be
        this one."""
        own = set() if self._announced else {self._request.node}
        return sorted(own | self._peers.others - self._peers.ready)

"""Several nodes on this computer, which run one job together: each has a home folder and a port of
127.0.0.1."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support import agentnode

from cloudddp.agent.protocol.gang import Gang
from cloudddp.agent.protocol.jobs import JobState, Verdict
from cloudddp.agent.protocol.start import StartReply, StartRequest


class Gangs:
    """The nodes of one job. `silence` and `join` are those of protocol.gang.Gang, in seconds."""

    def __init__(self, folder: Path, nodes: int, **limits: float) -> None:
        mark = agentnode.new_mark()
        self.nodes = [
            agentnode.Node(folder / f"home{number}", number=number, mark=mark) for number in range(nodes)
        ]
        self.gang: Gang = agentnode.gang_of(nodes, **limits)

    def __getitem__(self, node: int) -> agentnode.Node:
        return self.nodes[node]

    def start(
        self,
        *scripts: Sequence[str] | str,
        only: Sequence[int] = (),
        of_node: Mapping[int, Mapping[str, Any]] | None = None,
        **changes: Any,
    ) -> dict[int, StartReply]:
        """Start one rank per script, given for each node; a node without a list has one rank. `only`: those
        nodes. `of_node`: changes of some nodes."""
        requests, first = {}, 0
        for node, codes in zip(self.nodes, scripts, strict=True):
            own = [codes] if isinstance(codes, str) else codes
            if not only or node.number in only:
                requests[node] = node.starting(
                    *own,
                    first_rank=first,
                    **{"gang": self.gang, **changes, **(of_node or {}).get(node.number, {})},
                )
            first += len(own)
        return agentnode.start_together(requests)

    def start_requests(self, requests: Mapping[agentnode.Node, StartRequest]) -> dict[int, StartReply]:
        """Send these requests to their nodes at once."""
        return agentnode.start_together(requests)

    def pid(self, node: int, rank: int) -> int:
        return self.nodes[node].rank_pid(rank)

    def pids(self, node: int) -> Processes:
        return Processes(self.nodes[node])

    def states(self, *nodes: int) -> list[JobState]:
        """Wait until the job has ended on these nodes (all by default); return its states there."""
        return [node.ended() for node in [self.nodes[number] for number in nodes] or self.nodes]

    def verdict(self, *nodes: int) -> Verdict:
        """Return the verdict of these nodes (all by default), which is the same one, once no process of the
        job is left."""
        states = self.states(*nodes)
        found = {state.verdict for state in states}
        assert len(found) == 1, found
        (only,) = found
        assert only is not None
        assert {state.phase for state in states} == {only.phase}
        assert {state.exit_code for state in states} == {only.exit_code}
        self.gone(*nodes)
        return only

    def gone(self, *nodes: int) -> None:
        """Wait until no process of these nodes (all by default) is left."""
        for number in nodes or range(len(self.nodes)):
            agentnode.gone(self.nodes[number].home)

    def log(self, node: int, rank: int) -> bytes:
        path = self.nodes[node].folder() / "ranks" / f"{rank}.log"
        return path.read_bytes() if path.exists() else b""

    def notes(self, node: int, job: str = "job-1") -> str:
        """Return what the agent of a node, which has one rank, notes in the logs of a job."""
        folder = self.nodes[node].folder(job)
        found = (folder / "ranks" / f"{node}.log").read_text() + (folder / "launcher.log").read_text()
        return "\n".join(line for line in found.splitlines() if line.startswith("--- cloudddp: "))

    def end(self) -> list[int]:
        """End everything; return the processes that were left."""
        for node in self.nodes:
            for pid in agentnode.processes_of(node.home):  # one that a test has frozen
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        left = []
        for node in self.nodes:
            for pid in node.end():
                left.append(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return left


Make = Callable[..., Gangs]  # number of nodes, limits -> Gangs: the fixture `gangs`


class Processes:
    """The processes of a job on one node, once its ranks run: `guard`, `supervisor`, the `launchers` (the
    supervisor where ranks start directly), the `wrappers` of the ranks, and `ranks`."""

    def __init__(self, node: agentnode.Node) -> None:
        self.supervisor = node.supervisor_pid()
        self.guard = parent_of(self.supervisor)
        path = node.folder() / "ranks"
        expected = node.state().expected or 0
        agentnode.until(lambda: len(list(path.glob("[0-9]*.json"))) >= expected)
        self.ranks = [one.pid for one in node.state().ranks if one.pid]
        self.wrappers = [parent_of(pid) for pid in self.ranks]
        self.launchers = [parent_of(pid) for pid in self.wrappers]

    @property
    def of_cloudddp(self) -> list[int]:
        return [self.guard, self.supervisor, *self.wrappers]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def freeze(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def thaw(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def kill(*pids: int) -> None:
    """Kill processes at one moment: none of them sees the end of another."""
    freeze(*pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the kernel ends a rank whose parent has ended
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + agentnode.HANG_GUARD
    while any(map(agentnode.alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)

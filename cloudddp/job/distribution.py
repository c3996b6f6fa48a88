"""From where each node gets the files that it lacks. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from cloudddp.agent.protocol.sharing import next_sources

DIRECT = 4 << 20  # bytes for all nodes together that are sent to each of them from here
HERE = -1  # this computer, as a source


class Distribution:
    """From where each node gets what it lacks. Every node says what that is before anything is sent; then the
    one that lacks least gets it from here, and from a node that has everything up to WIDTH others get it, and
    so on. Pure."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self._asked = set(nodes)  # and have not answered
        self._lacking: dict[int, int] = {}  # bytes
        self._waiting: set[int] = set()
        self._sources: dict[int, int] = {}  # of nodes that are getting files now
        self._direct: set[int] = set()  # which get them from here, whoever has them
        self._holders: set[int] = set()

    def answered(self, node: int, lacking: int) -> None:
        """A node has said how many bytes it lacks: the first time, or after its source has failed."""
        if self._sources.pop(node, HERE) != HERE:
            self._direct.add(node)
        self._asked.discard(node)
        self._waiting.add(node)
        self._lacking[node] = lacking

    def is_waiting(self, node: int) -> bool:
        return node in self._waiting

    def copied(self, node: int) -> int:
        """Return how many bytes a node is getting from another one."""
        return self._lacking[node] if self._sources.get(node, HERE) != HERE else 0

    def complete(self, node: int, *, serves: bool) -> None:
        """A node has all files, and may have a port at which others get them."""
        self.gone(node)
        if serves:
            self._holders.add(node)

    def gone(self, node: int) -> None:
        """The step of a node has ended."""
        self._asked.discard(node)
        self._waiting.discard(node)
        self._holders.discard(node)
        self._sources.pop(node, None)

    def due(self) -> dict[int, int]:
        """Return which nodes are to get their files now, and from where. Nothing before all have answered."""
        if self._asked:
            return {}
        if sum(self._lacking[node] for node in self._waiting) <= DIRECT and not self._sources:
            self._direct |= self._waiting
        found = {node: HERE for node in self._waiting if node in self._direct or not self._lacking[node]}
        lacking = sorted(self._waiting - found.keys(), key=lambda node: (self._lacking[node], node))
        busy = {holder: [*self._sources.values()].count(holder) for holder in self._holders}
        found |= next_sources(busy, lacking)
        if lacking and not self._holders and HERE not in (*self._sources.values(), *found.values()):
            found[lacking[0]] = HERE
        self._sources |= found
        self._waiting -= found.keys()
        return found

"""Where the agent of a node listens for those of other nodes: the least that a sync has to import."""

from __future__ import annotations

from dataclasses import dataclass

from cloudddp.agent.protocol.codec import check_length, check_range
from cloudddp.agent.protocol.phases import MAX_NODES

MAX_ID = 64


@dataclass(frozen=True)
class Peer:
    """A node of a job or of a sync, and where its agent listens. `id` is that of its instance, '' where it is
    not needed."""

    node: int
    address: str
    port: int
    id: str = ""

    def __post_init__(self) -> None:
        check_range("node", self.node, 0, MAX_NODES)
        check_length("address", self.address, 64)
        check_range("port", self.port, 1, (1 << 16) - 1)
        check_length("id", self.id, MAX_ID)

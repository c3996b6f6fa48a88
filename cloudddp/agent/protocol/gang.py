"""The gang: the agents of one job, which know each other; what they tell each other, and the verdict.

Each agent connects to every other one over the private network, and sends on its own connection only: so
every pair of nodes is connected in both directions before a rank starts. Messages are lines of JSON with an
HMAC (agent/gang/mesh.py).
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Optional

from cloudddp.agent.protocol.checkpoints import ProjectPath
from cloudddp.agent.protocol.codec import ExitStatus, Number, ProtocolError, at_most, within
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.jobs import MAX_RANKS, Ago, Exited, Failure, LastLines, Line, Verdict
from cloudddp.agent.protocol.phases import MAX_NODES, Peer, Token
from cloudddp.agent.protocol.progress import KnownStragglers, Pace, ToleratedStall
from cloudddp.agent.protocol.sharing import SharedFiles
from cloudddp.agent.protocol.stacks import MAX_SENTENCE, Position

MAX_FACT = 300  # characters
MAX_PROBLEMS = 50
MAX_WROTE = 20  # files
LONGEST_MESSAGE = 1 << 20  # bytes

Fact = Annotated[str, at_most(MAX_FACT)]


@frozen
class Observed:
    """A failure, `ago` seconds before its message was sent: clocks of nodes differ, and one may be set while
    a job runs."""

    failure: Failure
    ago: Ago
    last_lines: LastLines = ()


@frozen
class Report:
    """How the job ended on one node: `failures` that were no consequence of a stop; `succeeded` if every rank
    exited with 0. `step` is the last that its script has reported. `cancelled`: seconds since the user
    cancelled it there. `exit_code` is that of a rank that was stopped and still exited by itself (143: it has
    saved a snapshot), or of the launcher. `exits`: the ranks that have exited with 0 by themselves."""

    succeeded: bool
    failures: Annotated[tuple[Observed, ...], at_most(300)] = ()
    cancelled: Optional[Ago] = None
    exit_code: Optional[ExitStatus] = None
    step: Optional[Number] = None
    exits: Annotated[tuple[Exited, ...], at_most(MAX_RANKS)] = ()


@frozen
class NodeFacts:
    """What a node is like: `gpus` as `8 x NVIDIA H100`, versions, the id of the container's `image`, and
    `defects` in words. '' where something is missing."""

    gpus: Fact = ""
    driver: Fact = ""
    python: Fact = ""
    torch: Fact = ""
    cuda: Fact = ""
    nccl: Fact = ""
    image: Fact = ""
    defects: Annotated[tuple[Fact, ...], at_most(20)] = ()


@frozen
class Wrote:
    """Files that a job wrote on one node, checkpoints first, then the newest: paths in the project."""

    names: Annotated[tuple[ProjectPath, ...], at_most(MAX_WROTE)] = ()


class Kind(Enum):
    """The kinds of messages."""

    HEARTBEAT = "heartbeat"
    READY = "ready"  # connected to every other node, in both directions; with the node's facts and clock
    STALLED = "stalled"  # of the first node: read the stacks of your ranks
    STACKS = "stacks"  # where the ranks of a node are
    LEFT = "left"  # of the first node: a stall is left alone, or over
    STRAGGLERS = "stragglers"  # of the first node: a rank is slow, or has caught up
    SNAPSHOT = "snapshot"  # what a node shares before the ranks start
    COPIED = "copied"  # the node has what it lacked of that
    WROTE = "wrote"  # what the job wrote on a node: the others name it if that node is lost
    STOP = "stop"  # end your ranks: the job was cancelled, or has failed here
    ENDED = "ended"  # no process of the job is left here
    RESTART = "restart"  # of the first node that is left: start the ranks again
    VERDICT = "verdict"
    CRASHED = "crashed"  # this agent ends by an error of its own


@frozen
class PeerMessage:
    """A message between two agents of a job."""

    kind: Kind
    attempt: int = 0  # that it is about
    cancelled: bool = False  # of STOP
    token: Token = ""  # of STOP, of the cancel
    grace: Optional[Ago] = None  # of STOP: seconds in which ranks may save: a node is about to end
    finished: bool = False  # of HEARTBEAT: every rank of the node has exited with 0
    idle: Ago = 0.0  # of HEARTBEAT: seconds for which the ranks of the node have done nothing
    report: Optional[Report] = None  # of ENDED
    # Of HEARTBEAT: how long steps take on the ranks of the node.
    paces: Annotated[tuple[Pace, ...], at_most(MAX_RANKS)] = ()
    stacks: Annotated[tuple[Position, ...], at_most(MAX_RANKS)] = ()  # of STACKS
    nccl: Annotated[str, at_most(MAX_SENTENCE)] = ""  # of STACKS: what NCCL's RAS reports of all ranks
    stall: Optional[ToleratedStall] = None  # of LEFT
    stragglers: KnownStragglers = ()  # of STRAGGLERS: all that are known
    verdict: Optional[Verdict] = None  # of VERDICT, and of RESTART: of the attempt that has failed
    offer: Optional[SharedFiles] = None  # of SNAPSHOT
    facts: Optional[NodeFacts] = None  # of READY
    wrote: Optional[Wrote] = None  # of WROTE
    clock: Optional[float] = None  # of READY, HEARTBEAT and others: seconds since the epoch
    error: Line = ""  # of CRASHED


@frozen
class Gang:
    """All nodes of a job, this one included, in order, and the `secret` that its agents share. It is never
    written to a disk. A node that sends nothing for `silence` seconds is lost. All have to be connected after
    `join` seconds. With `preflight` they have to be alike, and without defects."""

    peers: Annotated[tuple[Peer, ...], at_most(MAX_NODES)]
    secret: Annotated[str, at_most(256, least=32)]
    silence: Annotated[float, within(0.1, 3600)] = 15.0
    join: Annotated[float, within(0.1, 600)] = 20.0
    preflight: bool = True

    def __post_init__(self) -> None:
        if len({peer.node for peer in self.peers}) != len(self.peers):
            raise ProtocolError("a node is named twice")


@frozen
class Unreachable:
    """Connections that a node does not have: `to` those nodes, with the reason; and `by` those, which did not
    connect. `error`: this node could not listen. `problems`: the nodes are connected, and differ or have
    defects."""

    to: Annotated[dict[int, Line], at_most(MAX_NODES)]
    by: Annotated[tuple[int, ...], at_most(MAX_NODES)]
    error: Line = ""
    problems: Annotated[tuple[Line, ...], at_most(MAX_PROBLEMS)] = ()

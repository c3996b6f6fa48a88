"""The gang: the agents of one job, which know each other; what they tell each other, and the verdict.

Each agent connects to every other one over the private network, and sends on its own connection only: so
every pair of nodes is connected in both directions before a rank starts. Messages are lines of JSON with an
HMAC (agent/gang/mesh.py).
"""

from __future__ import annotations

from enum import Enum
from typing import Optional

from cloudddp.agent.protocol.codec import MAX_COUNT, ProtocolError, check_length, check_range
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.jobs import MAX_AGO, MAX_LINE, MAX_RANKS, Exited, Failure, Verdict, check_lines
from cloudddp.agent.protocol.phases import MAX_NODES, MAX_TOKEN, Peer
from cloudddp.agent.protocol.progress import MAX_STRAGGLERS, LeftStall, Pace, Straggler
from cloudddp.agent.protocol.snapshots import Offer, check_path
from cloudddp.agent.protocol.stacks import MAX_SENTENCE, Position

MAX_FACT = 300  # characters
MAX_FAILURES = 300  # in one report: each rank has at most one
MAX_PROBLEMS = 50
MAX_WROTE = 5  # files
LONGEST_MESSAGE = 1 << 20  # bytes


@frozen
class Observed:
    """A failure, `ago` seconds before its message was sent: clocks of nodes differ, and one may be set while
    a job runs."""

    failure: Failure
    ago: float
    last_lines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_range("ago", self.ago, 0, MAX_AGO)
        check_lines(self.last_lines)


@frozen
class Report:
    """How the job ended on one node: `failures` that were no consequence of a stop; `succeeded` if every rank
    exited with 0. `step` is the last that its script has reported. `cancelled`: seconds since the user
    cancelled it there. `exit_code` is that of a rank that was stopped and still exited by itself (143: it has
    saved a snapshot), or of the launcher. `exits`: the ranks that have exited with 0 by themselves."""

    succeeded: bool
    failures: tuple[Observed, ...] = ()
    cancelled: Optional[float] = None
    exit_code: Optional[int] = None
    step: Optional[int] = None
    exits: tuple[Exited, ...] = ()

    def __post_init__(self) -> None:
        check_length("exits", self.exits, MAX_RANKS)
        check_range("step", self.step, -MAX_COUNT, MAX_COUNT)
        check_length("failures", self.failures, MAX_FAILURES)
        check_range("cancelled", self.cancelled, 0, MAX_AGO)
        check_range("exit_code", self.exit_code, 0, 255)


@frozen
class Facts:
    """What a node is like: `gpus` as `8 x NVIDIA H100`, versions, the id of the container's `image`, and
    `defects` in words. '' where something is missing."""

    gpus: str = ""
    driver: str = ""
    python: str = ""
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    image: str = ""
    defects: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_length("defects", self.defects, 20)
        versions = (self.python, self.torch, self.cuda, self.nccl, self.image)
        for text in (self.gpus, self.driver, *versions, *self.defects):
            check_length("a fact", text, MAX_FACT)


@frozen
class Wrote:
    """Files that a job wrote on one node, checkpoints first, then the newest: paths in the project."""

    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_length("names", self.names, MAX_WROTE)
        for name in self.names:
            check_path(name)


class Kind(Enum):
    """The kinds of messages."""

    HEARTBEAT = "heartbeat"
    READY = "ready"  # connected to every other node, in both directions; with the node's facts and clock
    STALLED = "stalled"  # of the first node: read the stacks of your ranks
    STACKS = "stacks"  # where the ranks of a node are
    LEFT = "left"  # of the first node: a stall is left alone, or over
    STRAGGLERS = "stragglers"  # of the first node: a rank is slow, or has caught up
    SNAPSHOT = "snapshot"  # the newest one of a node
    COPIED = "copied"  # the node has the newest snapshot of all
    WROTE = "wrote"  # what the job wrote on a node, which others may have to name
    STOP = "stop"  # end your ranks: the job was cancelled, or has failed here
    ENDED = "ended"  # no process of the job is left here
    RESTART = "restart"  # of the first node that is left: start the ranks again
    VERDICT = "verdict"
    CRASHED = "crashed"  # this agent ends by an error of its own


@frozen
class Message:
    """A message between two agents of a job."""

    kind: Kind
    attempt: int = 0  # that it is about
    cancelled: bool = False  # of STOP
    token: str = ""  # of STOP, of the cancel
    grace: Optional[float] = None  # of STOP: seconds in which ranks may save: a node is about to end
    finished: bool = False  # of HEARTBEAT: every rank of the node has exited with 0
    idle: float = 0.0  # of HEARTBEAT: seconds for which the ranks of the node have done nothing
    report: Optional[Report] = None  # of ENDED
    paces: tuple[Pace, ...] = ()  # of HEARTBEAT: how long steps take on the ranks of the node
    stacks: tuple[Position, ...] = ()  # of STACKS
    nccl: str = ""  # of STACKS: what NCCL's RAS reports of all ranks
    stall: Optional[LeftStall] = None  # of LEFT
    stragglers: tuple[Straggler, ...] = ()  # of STRAGGLERS: all that are known
    verdict: Optional[Verdict] = None  # of VERDICT, and of RESTART: of the attempt that has failed
    offer: Optional[Offer] = None  # of SNAPSHOT
    facts: Optional[Facts] = None  # of READY
    wrote: Optional[Wrote] = None  # of WROTE
    clock: Optional[float] = None  # of READY, HEARTBEAT and others: seconds since the epoch
    error: str = ""  # of CRASHED

    def __post_init__(self) -> None:
        check_length("token", self.token, MAX_TOKEN)
        check_length("error", self.error, MAX_LINE)
        check_range("idle", self.idle, 0, MAX_AGO)
        check_length("paces", self.paces, MAX_RANKS)
        check_length("stacks", self.stacks, MAX_RANKS)
        check_length("nccl", self.nccl, MAX_SENTENCE)
        check_length("stragglers", self.stragglers, MAX_STRAGGLERS)
        check_range("grace", self.grace, 0, MAX_AGO)


@frozen
class Gang:
    """All nodes of a job, this one included, in order, and the `secret` that its agents share. It is never
    written to a disk. A node that sends nothing for `silence` seconds is lost. All have to be connected after
    `join` seconds. With `preflight` they have to be alike, and without defects."""

    peers: tuple[Peer, ...]
    secret: str
    silence: float = 15.0
    join: float = 20.0
    preflight: bool = True

    def __post_init__(self) -> None:
        check_length("peers", self.peers, MAX_NODES)
        check_range("the length of the secret", len(self.secret), 32, 256)
        check_range("silence", self.silence, 0.1, 3600)
        check_range("join", self.join, 0.1, 600)
        if len({peer.node for peer in self.peers}) != len(self.peers):
            raise ProtocolError("a node is named twice")


@frozen
class Unreachable:
    """Connections that a node does not have: `to` those nodes, with the reason; and `by` those, which did not
    connect. `error`: this node could not listen. `problems`: the nodes are connected, and differ or have
    defects."""

    to: dict[int, str]
    by: tuple[int, ...]
    error: str = ""
    problems: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_length("to", self.to, MAX_NODES)
        check_length("by", self.by, MAX_NODES)
        check_length("error", self.error, MAX_LINE)
        check_length("problems", self.problems, MAX_PROBLEMS)
        for text in self.problems:
            check_length("a problem", text, MAX_LINE)
        for reason in self.to.values():
            check_length("a reason", reason, MAX_LINE)

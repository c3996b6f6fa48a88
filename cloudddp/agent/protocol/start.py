"""Starting a job on a node: `setup` and `start`."""

from __future__ import annotations

from dataclasses import field
from enum import Enum
from typing import Annotated, Optional

from cloudddp.agent.protocol.codec import (
    JobId,
    OptionalJobId,
    PathText,
    ProjectName,
    ProtocolError,
    ShortText,
    Size,
    Text,
    at_most,
    within,
)
from cloudddp.agent.protocol.copies import MAX_BUCKET, MAX_KEY, Destination
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.gang import Gang, Unreachable
from cloudddp.agent.protocol.jobs import MAX_GRACE, MAX_RANKS, RankCount
from cloudddp.agent.protocol.phases import LOG_MB, MAX_NODES, LogMiB, NodeRank, Restarts
from cloudddp.agent.protocol.sharing import SnapshotSearch

MAX_LEFT = 1e8  # seconds until a deadline
MAX_SAVE = 900.0  # seconds; the wrapper of a rank that was asked to end kills it after that time
MAX_MOMENT = 40  # characters
MAX_PARTS, MAX_PART = 16, 40  # parts of a start, and characters of the name of one
MAX_STALL = 1e5  # minutes
MAX_DATA = 100  # copies

PartName = Annotated[str, at_most(MAX_PART)]
SecondsLeft = Annotated[float, within(0, MAX_LEFT)]
SaveSeconds = Annotated[float, within(0, MAX_SAVE)]
DataPaths = Annotated[dict[str, str], at_most(MAX_DATA)]


class OnStall(Enum):
    """What the agents do when no rank has done anything for a while."""

    KILL = "kill"  # the job fails
    RESTART = "restart"  # it fails, and is started again as after any other failure
    LEAVE = "leave"  # it goes on; the stacks are in its logs
    DOWN = "down"  # it fails, and the nodes shut down


@frozen
class Process:
    """A process that the agent starts: `launcher` (torchrun; empty where ranks start directly) followed by
    `rank`. The agent puts its rank wrapper between the two, which records the log, exit code and end of each
    rank. A word with a slash is a path relative to the project."""

    launcher: tuple[str, ...]
    rank: tuple[str, ...]
    env: dict[str, str]

    def __post_init__(self) -> None:
        if not self.launcher and not self.rank:
            raise ProtocolError("a process has no command")


@frozen
class Container:
    """The Docker image in which ranks and setup commands run: its name, or, once a node has it, its id.
    `gpus`: they get the node's GPUs. `torch`: ranks need it, for torchrun."""

    image: PathText
    gpus: bool = False
    torch: bool = True


@frozen
class SetupReply:
    """How the setup ended. `command` is the one that failed, with the end of its `output`; `data`: what
    failed is a copy from S3, or a shared folder, and `command` names it. `cancelled`: the job was cancelled
    meanwhile, and no process of its setup is left. `read_only`: the environment of Python that the command
    was not allowed to change, or ''. `image`: the id of the container's image; after a failure, its id or
    name where that image or Docker has failed, and '' for a command of the user."""

    exit_code: Annotated[int, within(-255, 255)]
    command: Text = ""
    output: Text = ""
    cancelled: bool = False
    read_only: PathText = ""
    data: bool = False
    image: PathText = ""


@frozen
class DataCopy:
    """Objects of `bucket` whose keys begin with `prefix` and a slash, which ranks find at `path` in the
    project."""

    bucket: Annotated[str, at_most(MAX_BUCKET)]
    prefix: Annotated[str, at_most(MAX_KEY)]
    path: PathText


@frozen
class SharedFolder:
    """A folder that all nodes share, and find at `path` in the project: `below` it in what is mounted from
    `source`, HOST:/ (NFS) or HOST@tcp:/NAME (Lustre). Without a source it is a folder of this node, which
    exports it to the addresses `clients`. `owned`: this node counts what is in it as its own results."""

    path: PathText
    source: PathText = ""
    below: PathText = ""
    clients: Annotated[tuple[PathText, ...], at_most(MAX_NODES)] = ()
    owned: bool = False


@frozen
class SetupRequest:
    """Mount `shared` folders, copy `data`, where it differs, and run `commands` in the project unless they
    ran here before with the same contents of `inputs` (paths in the project). They belong to the job that is
    being launched. The environment of `python` (a path on the node, '' for the node's default) is active
    while they run."""

    job: JobId
    node: NodeRank
    project: ProjectName
    script: Text
    commands: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    python: PathText = ""
    data: Annotated[tuple[DataCopy, ...], at_most(MAX_DATA)] = ()
    paths: DataPaths = field(default_factory=dict)  # variables that have absolute paths in the project
    container: Optional[Container] = None  # in which the commands run, and the environment of `python` is
    shared: Annotated[tuple[SharedFolder, ...], at_most(MAX_DATA)] = ()

    STEP = "setup"
    REPLY = SetupReply


@frozen
class StartReply:
    """The job's supervisor runs. `unreachable`: the job was not started, because this node or another one is
    not connected to all others. `platform` is the node's, such as linux-x86_64; `tool` the SHA-256 of the
    py-spy that was sent there, '' for none. `reached`: how many seconds ago the agent reached the parts of
    the start, by name."""

    unreachable: Optional[Unreachable] = None
    platform: Annotated[str, at_most(MAX_MOMENT)] = ""
    tool: ShortText = ""
    reached: Annotated[dict[PartName, SecondsLeft], at_most(MAX_PARTS)] = field(default_factory=dict)


@frozen
class Deadline:
    """When the nodes terminate: in `left` seconds, since clocks differ. `at` is that time as text."""

    left: SecondsLeft
    at: Annotated[str, at_most(MAX_MOMENT)]


@frozen
class StartRequest:
    """Start a job's processes on this node, once its agent is connected to those of all other nodes of the
    `gang`. `env` is common to all processes; it may hold secrets. None of it is written to the disk. A job
    that fails is started again `retries` times in an hour.

    `notify`: a URL or a command that gets the events of the job, '' for none; it may be a secret. `save`:
    seconds before the `deadline`, and before a scheduled maintenance, at which the ranks are told to save and
    end. `poweroff`: the node ends once unused for so many seconds after the job; None: it does not. `keep`:
    likewise after a stall that ends the nodes, and at least so long where the `results` are not all in S3.
    `results`: where the node copies its results then; None: nowhere. `snapshots`: of which the newest is sent
    to a node that stays if this one is about to end; None: none is. `version`: that of the project's files
    that this launch has sent or compared (transfer.py); the job is refused where they have another one."""

    job: JobId
    node: NodeRank
    project: ProjectName
    script: Text
    env: dict[str, str]
    processes: Annotated[tuple[Process, ...], at_most(MAX_RANKS)]
    ranks: RankCount
    max_restarts: Restarts
    stop_grace: Annotated[float, within(0, MAX_GRACE)]  # seconds
    gang: Gang
    retries: Restarts = 0
    stall_minutes: Annotated[float, within(0, MAX_STALL)] = 0.0  # 0: it is not watched
    alone_seconds: SaveSeconds = 0.0  # in which ranks have to connect to another node; 0: nobody looks
    straggler_seconds: SaveSeconds = (
        0.0  # for which a rank stays slow until it is a straggler; 0: nobody looks
    )
    on_stall: OnStall = OnStall.KILL
    resumed_from: OptionalJobId = ""  # the job that this one continues, '' for none
    log_mb: LogMiB = LOG_MB  # MiB of each rank's log that are kept
    save: SaveSeconds = 180.0
    deadline: Optional[Deadline] = None
    poweroff: Optional[SecondsLeft] = None
    keep: SecondsLeft = 0.0
    results: Optional[Destination] = None
    snapshots: Optional[SnapshotSearch] = None
    version: Size = 0
    paths: DataPaths = field(default_factory=dict)  # as for SetupRequest
    notify: PathText = ""
    usd_hour: Annotated[float, within(0, 1e6)] = 0.0  # of all nodes, for what `notify` gets; 0: unknown
    container: Optional[Container] = None  # in which the ranks run

    STEP = "start"
    REPLY = StartReply

    @property
    def secrets(self) -> list[str]:
        """What may be secret: values of the user's variables, and where notifications go."""
        own = [value for name, value in self.env.items() if not name.startswith("CLOUDDDP_")]
        return [*own, self.notify]

    @property
    def program(self) -> str:
        """The program that starts the ranks, which comes from the environment of the job's Python; '' for
        none."""
        first = self.processes[0] if self.processes else None
        return (first.launcher or first.rank)[0] if first else ""

    def __post_init__(self) -> None:
        if self.node not in [peer.node for peer in self.gang.peers]:
            raise ProtocolError("the gang lacks this node")

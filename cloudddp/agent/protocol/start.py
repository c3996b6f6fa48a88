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
MAX_MOMENT = 40  # characters
MAX_DATA = 100  # copies

SecondsLeft = Annotated[float, within(0, MAX_LEFT)]
SaveSeconds = Annotated[float, within(0, 900.0)]  # the wrapper of a rank kills it after that time
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
    reached: Annotated[dict[ShortText, SecondsLeft], at_most(16)] = field(default_factory=dict)


@frozen
class Deadline:
    """When the nodes terminate: in `left` seconds, since clocks differ. `at` is that time as text."""

    left: SecondsLeft
    at: Annotated[str, at_most(MAX_MOMENT)]


@frozen
class Work:
    """What runs on a node. `env` is common to all processes; it may hold secrets. `ranks`: how many its
    `processes` start. `log_mb`: MiB of each rank's log that are kept."""

    script: Text
    env: dict[str, str]
    processes: Annotated[tuple[Process, ...], at_most(MAX_RANKS)]
    ranks: RankCount
    max_restarts: Restarts
    stop_grace: Annotated[float, within(0, MAX_GRACE)]  # seconds
    log_mb: LogMiB = LOG_MB
    paths: DataPaths = field(default_factory=dict)  # as for SetupRequest
    container: Optional[Container] = None  # in which the ranks run

    @property
    def program(self) -> str:
        """The program that starts the ranks, which comes from the environment of the job's Python; '' for
        none."""
        first = self.processes[0] if self.processes else None
        return (first.launcher or first.rank)[0] if first else ""


@frozen
class Watch:
    """How a job is watched. One that fails is started again `retries` times in an hour. 0 minutes or seconds:
    nobody looks. `alone_seconds`: in which ranks have to connect to another node; `straggler_seconds`: for
    which a rank stays slow until it is a straggler. `notify`: a URL or a command that gets the events of the
    job, '' for none; it may be a secret. `usd_hour`: what all nodes cost, for these; 0: unknown."""

    retries: Restarts = 0
    stall_minutes: Annotated[float, within(0, 1e5)] = 0.0
    on_stall: OnStall = OnStall.KILL
    alone_seconds: SaveSeconds = 0.0
    straggler_seconds: SaveSeconds = 0.0
    notify: PathText = ""
    usd_hour: Annotated[float, within(0, 1e6)] = 0.0


@frozen
class NodeEnd:
    """How a node ends. `save`: seconds before the `deadline`, and before a scheduled maintenance, at which
    the ranks are told to save and end. `poweroff`: it ends once unused for so many seconds after the job;
    None: it does not. `keep`: likewise after a stall that ends the nodes, and at least so long where the
    `results` are not all in S3. `results`: where it copies its results then; None: nowhere."""

    save: SaveSeconds = 180.0
    deadline: Optional[Deadline] = None
    poweroff: Optional[SecondsLeft] = None
    keep: SecondsLeft = 0.0
    results: Optional[Destination] = None


@frozen
class StartRequest:
    """Start a job on this node, once its agent is connected to those of all other nodes of the `gang`. It
    is never written to the disk: its variables and `watch.notify` may be secret.

    `resumed_from`: the job that this one continues, '' for none. `snapshots`: what the nodes share before the
    ranks start, and of which the newest is sent to a node that stays if this one is about to end; None: none.
    `version`: that of the project's files that this launch has sent or compared; the job is refused where
    they have another one."""

    job: JobId
    node: NodeRank
    project: ProjectName
    gang: Gang
    work: Work
    watch: Watch = Watch()
    end: NodeEnd = NodeEnd()
    resumed_from: OptionalJobId = ""
    snapshots: Optional[SnapshotSearch] = None
    version: Size = 0

    STEP = "start"
    REPLY = StartReply

    @property
    def secrets(self) -> list[str]:
        """What may be secret: values of the user's variables, and where notifications go."""
        own = [value for name, value in self.work.env.items() if not name.startswith("CLOUDDDP_")]
        return [*own, self.watch.notify]

    def __post_init__(self) -> None:
        if self.node not in [peer.node for peer in self.gang.peers]:
            raise ProtocolError("the gang lacks this node")

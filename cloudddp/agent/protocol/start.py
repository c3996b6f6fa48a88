"""Starting a job on a node: `setup` and `start`."""

from __future__ import annotations

from dataclasses import field
from enum import Enum
from typing import Optional

from cloudddp.agent.protocol.codec import (
    MAX_PATH,
    MAX_SIZE,
    MAX_TEXT,
    ProtocolError,
    check_job_id,
    check_length,
    check_project,
    check_range,
)
from cloudddp.agent.protocol.copies import MAX_BUCKET, MAX_KEY, Destination
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.gang import Gang, Unreachable
from cloudddp.agent.protocol.jobs import MAX_GRACE, MAX_PID, MAX_RANKS
from cloudddp.agent.protocol.phases import LOG_MB, MAX_LOG_MB, MAX_NODES, MAX_RESTARTS, MIN_LOG_MB
from cloudddp.agent.protocol.snapshots import SnapshotSearch

MAX_LEFT = 1e8  # seconds until a deadline
MAX_SAVE = 900.0  # seconds; the wrapper of a rank that was asked to end kills it after that time
MAX_MOMENT = 40  # characters
MAX_PARTS, MAX_PART = 16, 40  # parts of a start, and characters of the name of one
MAX_STALL = 1e5  # minutes
MAX_DATA = 100  # copies


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

    image: str
    gpus: bool = False
    torch: bool = True

    def __post_init__(self) -> None:
        check_length("image", self.image, MAX_PATH)


@frozen
class SetupReply:
    """How the setup ended. `command` is the one that failed, with the end of its `output`; `data`: what
    failed is a copy from S3, or a shared folder, and `command` names it. `cancelled`: the job was cancelled
    meanwhile, and no process of its setup is left. `read_only`: the environment of Python that the command
    was not allowed to change, or ''. `image`: the id of the container's image; after a failure, its id or
    name where that image or Docker has failed, and '' for a command of the user."""

    exit_code: int
    command: str = ""
    output: str = ""
    cancelled: bool = False
    read_only: str = ""
    data: bool = False
    image: str = ""

    def __post_init__(self) -> None:
        check_range("exit_code", self.exit_code, -255, 255)
        check_length("image", self.image, MAX_PATH)
        check_length("command", self.command, MAX_TEXT)
        check_length("output", self.output, MAX_TEXT)
        check_length("read_only", self.read_only, MAX_PATH)


@frozen
class DataCopy:
    """Objects of `bucket` whose keys begin with `prefix` and a slash, which ranks find at `path` in the
    project."""

    bucket: str
    prefix: str
    path: str

    def __post_init__(self) -> None:
        check_length("bucket", self.bucket, MAX_BUCKET)
        check_length("prefix", self.prefix, MAX_KEY)
        check_length("path", self.path, MAX_PATH)


@frozen
class SharedFolder:
    """A folder that all nodes share, and find at `path` in the project: `below` it in what is mounted from
    `source`, HOST:/ (NFS) or HOST@tcp:/NAME (Lustre). Without a source it is a folder of this node, which
    exports it to the addresses `clients`. `owned`: this node counts what is in it as its own results."""

    path: str
    source: str = ""
    below: str = ""
    clients: tuple[str, ...] = ()
    owned: bool = False

    def __post_init__(self) -> None:
        check_length("clients", self.clients, MAX_NODES)
        for text in (self.path, self.source, self.below, *self.clients):
            check_length("shared", text, MAX_PATH)


@frozen
class SetupRequest:
    """Mount `shared` folders, copy `data`, where it differs, and run `commands` in the project unless they
    ran here before with the same contents of `inputs` (paths in the project). They belong to the job that is
    being launched. The environment of `python` (a path on the node, '' for the node's default) is active
    while they run."""

    job: str
    node: int
    project: str
    script: str
    commands: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    python: str = ""
    data: tuple[DataCopy, ...] = ()
    paths: dict[str, str] = field(default_factory=dict)  # variables that have absolute paths in the project
    container: Optional[Container] = None  # in which the commands run, and the environment of `python` is
    shared: tuple[SharedFolder, ...] = ()

    STEP = "setup"
    REPLY = SetupReply

    def __post_init__(self) -> None:
        check_job_id("job", self.job)
        check_range("node", self.node, 0, MAX_NODES)
        check_project(self.project)
        check_length("script", self.script, MAX_TEXT)
        check_length("python", self.python, MAX_PATH)
        check_length("data", self.data, MAX_DATA)
        check_length("shared", self.shared, MAX_DATA)
        check_length("paths", self.paths, MAX_DATA)


@frozen
class StartReply:
    """The job's supervisor runs. `unreachable`: the job was not started, because this node or another one is
    not connected to all others. `platform` is the node's, such as linux-x86_64; `tool` the SHA-256 of the
    py-spy that was sent there, '' for none. `reached`: how many seconds ago the agent reached the parts of
    the start, by name."""

    pid: int
    unreachable: Optional[Unreachable] = None
    platform: str = ""
    tool: str = ""
    reached: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_length("platform", self.platform, MAX_MOMENT)
        check_length("tool", self.tool, 64)
        check_range("pid", self.pid, 1, MAX_PID)
        check_length("reached", self.reached, MAX_PARTS)
        for name, seconds in self.reached.items():
            check_length("reached", name, MAX_PART)
            check_range("reached", seconds, 0, MAX_LEFT)


@frozen
class Deadline:
    """When the nodes terminate: in `left` seconds, since clocks differ. `at` is that time as text."""

    left: float
    at: str

    def __post_init__(self) -> None:
        check_range("left", self.left, 0, MAX_LEFT)
        check_length("at", self.at, MAX_MOMENT)


@frozen
class StartRequest:
    """Start a job's processes on this node, once its agent is connected to those of all other nodes of the
    `gang`. `env` is common to all processes; it may hold secrets. None of it is written to the disk. A job
    that fails is started again `retries` times in an hour.

    `notify`: a URL or a command that gets the events of the job, '' for none; it may be a secret. `save`:
    seconds before the `deadline`, and before a scheduled maintenance, at which the ranks are told to save and
    end. `poweroff`: the node powers off so many seconds after the end of the job; None: it does not. `keep`:
    likewise after a stall that ends the nodes, and at least so long where the `results` are not all in S3.
    `results`: where the node copies its results then; None: nowhere. `snapshots`: of which the newest is sent
    to a node that stays if this one is about to end; None: none is. `version`: that of the project's files
    that this launch has sent or compared (transfer.py); the job is refused where they have another one."""

    job: str
    node: int
    project: str
    script: str
    env: dict[str, str]
    processes: tuple[Process, ...]
    ranks: int
    max_restarts: int
    stop_grace: float  # seconds
    gang: Gang
    retries: int = 0
    stall_minutes: float = 0.0  # 0: it is not watched
    alone_seconds: float = 0.0  # in which ranks have to connect to another node; 0: nobody looks
    straggler_seconds: float = 0.0  # for which a rank stays slow until it is a straggler; 0: nobody looks
    on_stall: OnStall = OnStall.KILL
    resumed_from: str = ""  # the job that this one continues, '' for none
    log_mb: int = LOG_MB  # MiB of each rank's log that are kept
    save: float = 180.0
    deadline: Optional[Deadline] = None
    poweroff: Optional[float] = None
    keep: float = 0.0
    results: Optional[Destination] = None
    snapshots: Optional[SnapshotSearch] = None
    version: int = 0
    paths: dict[str, str] = field(default_factory=dict)  # as for SetupRequest
    notify: str = ""
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
        check_job_id("job", self.job)
        check_range("node", self.node, 0, MAX_NODES)
        check_project(self.project)
        check_length("script", self.script, MAX_TEXT)
        check_length("processes", self.processes, MAX_RANKS)
        check_range("ranks", self.ranks, 0, MAX_RANKS)
        check_range("max_restarts", self.max_restarts, 0, MAX_RESTARTS)
        check_range("stop_grace", self.stop_grace, 0, MAX_GRACE)
        check_range("retries", self.retries, 0, MAX_RESTARTS)
        check_range("stall_minutes", self.stall_minutes, 0, MAX_STALL)
        check_range("alone_seconds", self.alone_seconds, 0, MAX_SAVE)
        check_range("straggler_seconds", self.straggler_seconds, 0, MAX_SAVE)
        check_range("save", self.save, 0, MAX_SAVE)
        check_length("notify", self.notify, MAX_PATH)
        check_range("poweroff", self.poweroff, 0, MAX_LEFT)
        check_range("version", self.version, 0, MAX_SIZE)
        check_length("paths", self.paths, MAX_DATA)
        check_range("keep", self.keep, 0, MAX_LEFT)
        if self.resumed_from:
            check_job_id("resumed_from", self.resumed_from)
        if self.node not in [peer.node for peer in self.gang.peers]:
            raise ProtocolError("the gang lacks this node")
        check_range("log_mb", self.log_mb, MIN_LOG_MB, MAX_LOG_MB)

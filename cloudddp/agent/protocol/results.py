"""Files that jobs wrote on a node and that were not pulled yet: `new_files` and `pulled`."""

from __future__ import annotations

from dataclasses import field

from cloudddp.agent.protocol.checkpoints import MAX_PARTS, Part
from cloudddp.agent.protocol.codec import (
    MAX_COUNT,
    MAX_PATH,
    MAX_REASON,
    MAX_SIZE,
    ProtocolError,
    check_job_id,
    check_length,
    check_project,
    check_range,
)
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.phases import MAX_NODES
from cloudddp.agent.protocol.readings import READINGS_FILE

MAX_PLACES = 20  # that a reply names
MAX_LEFT = 1000  # files that were left out, of which a node knows
FACTS_FILE = "facts.json"  # in a job's folder: the Facts of the node, where a preflight looked for them
MASKED_FILE = "masked.json"
# Of a job's folder on a node: what explains how it ended.
EVIDENCE = (
    "ranks",
    "launcher.log",
    "setup.log",
    "supervisor.log",
    "verdict.json",
    MASKED_FILE,
    "status.json",
    "stragglers.json",
    "stall.json",
    "stacks",
    "flight-recorder",
    READINGS_FILE,
    "state.json",
    FACTS_FILE,
)


@frozen
class Masked:
    """What a program wrote of a verdict, for the report: without what may be secret."""

    detail: str = ""
    last_lines: tuple[str, ...] = ()


@frozen
class NewPath:
    """The new files of one folder (its name ends with '/') or one new file, by its path in the project."""

    name: str
    files: int
    size: int  # bytes

    def __post_init__(self) -> None:
        check_length("name", self.name, MAX_PATH)
        if not self.name or "\0" in self.name:
            raise ProtocolError("name is not a path")
        check_range("files", self.files, 0, MAX_COUNT)
        check_range("size", self.size, 0, MAX_SIZE)


@frozen
class NewFiles:
    """The number of new files, their bytes, and the largest paths among them."""

    files: int
    size: int
    paths: tuple[NewPath, ...]

    def __post_init__(self) -> None:
        check_range("files", self.files, 0, MAX_COUNT)
        check_range("size", self.size, 0, MAX_SIZE)
        check_length("paths", self.paths, MAX_PLACES)


@frozen
class JobFiles:
    """The files of one job on a node that were not pulled yet: below its outputs, and elsewhere in the
    project."""

    job: str
    outputs: NewFiles
    others: NewFiles

    def __post_init__(self) -> None:
        check_job_id("job", self.job)


@frozen
class LeftFile:
    """A path in the project that a pull has left out, or that cannot be read, and why."""

    name: str
    reason: str

    def __post_init__(self) -> None:
        check_length("name", self.name, MAX_PATH)
        check_length("reason", self.reason, MAX_REASON)


@frozen
class NewFilesReply:
    """`time_ns` is when the search began, by the clock of the node's file system, for PulledRequest;
    `complete` is False where there were too many files to look at; `rank_zero`: the node ran rank 0;
    `running` are job ids; `checkpoints`: its parts of sharded ones; `elsewhere`: by the numbers of other
    nodes, the newest files that the last job wrote there and this node lacks."""

    time_ns: int
    complete: bool
    rank_zero: bool
    running: tuple[str, ...]
    jobs: tuple[JobFiles, ...]
    left: tuple[LeftFile, ...] = ()
    checkpoints: tuple[Part, ...] = ()
    elsewhere: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_range("time_ns", self.time_ns, 0, MAX_SIZE)
        check_length("elsewhere", self.elsewhere, MAX_NODES)
        for names in self.elsewhere.values():
            check_length("elsewhere", names, MAX_PLACES)
            for name in names:
                check_length("a name", name, MAX_PATH)
        check_length("checkpoints", self.checkpoints, MAX_PARTS)
        check_length("running", self.running, MAX_PLACES)
        check_length("jobs", self.jobs, MAX_PLACES)
        check_length("left", self.left, MAX_PLACES)
        for job in self.running:
            check_job_id("running", job)


@frozen
class NewFilesRequest:
    """Search for files that were not pulled yet, of one job or ('') of all. `outputs` and `scratch` are paths
    in the project: files below `outputs` are counted apart, files below `scratch` not at all. Without
    `outputs` those count as outputs that file_steps.Selection takes, with `limit`. A copy that the node got
    before ranks started does not count if `present`, instances that answer, has the one that wrote it."""

    project: str
    outputs: tuple[str, ...]
    scratch: tuple[str, ...]
    job: str = ""
    limit: int = 0
    present: tuple[str, ...] = ()

    STEP = "new_files"
    REPLY = NewFilesReply

    def __post_init__(self) -> None:
        check_project(self.project)
        if self.job:
            check_job_id("job", self.job)
        check_range("limit", self.limit, 0, MAX_SIZE)


@frozen
class PulledReply:
    """How many names the node has recorded."""

    recorded: int

    def __post_init__(self) -> None:
        check_range("recorded", self.recorded, 0, MAX_COUNT)


@frozen
class PulledRequest:
    """Remember that the paths `names` were pulled as they were at `time_ns` (of a NewFilesReply), all but
    what was `left`. `put_back`: they are files that the laptop has sent; `checkpoints` says who wrote
    sharded ones."""

    project: str
    names: tuple[str, ...]
    time_ns: int
    left: tuple[LeftFile, ...] = ()
    put_back: bool = False
    checkpoints: tuple[Part, ...] = ()

    STEP = "pulled"
    REPLY = PulledReply

    def __post_init__(self) -> None:
        check_project(self.project)
        check_range("time_ns", self.time_ns, 0, MAX_SIZE)
        check_length("left", self.left, MAX_LEFT)
        check_length("checkpoints", self.checkpoints, MAX_PARTS)

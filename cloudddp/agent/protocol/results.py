"""Files that jobs wrote on a node and that were not pulled yet: `new_files` and `pulled`."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from cloudddp.agent.protocol.checkpoints import MAX_PARTS, Part
from cloudddp.agent.protocol.codec import (
    MAX_PATH,
    MAX_REASON,
    Count,
    JobId,
    OptionalJobId,
    PathText,
    ProjectName,
    Size,
    at_most,
)
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.phases import MAX_NODES, Done, NodeRank
from cloudddp.agent.protocol.readings import READINGS_FILE

MAX_PLACES = 20  # that a reply names
MAX_LEFT = 1000  # files that were left out, of which a node knows
_Names = Annotated[tuple[PathText, ...], at_most(MAX_PLACES)]
FACTS_FILE = "facts.json"  # in a job's folder: the NodeFacts of the node, where a preflight looked for them
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

    name: Annotated[PathText, at_most(MAX_PATH, least=1)]
    files: Count
    size: Size  # bytes


@frozen
class NewFiles:
    """The number of new files, their bytes, and the largest paths among them."""

    files: Count
    size: Size
    paths: Annotated[tuple[NewPath, ...], at_most(MAX_PLACES)]


@frozen
class JobFiles:
    """The files of one job on a node that were not pulled yet: below its outputs, and elsewhere in the
    project."""

    job: JobId
    outputs: NewFiles
    others: NewFiles


@frozen
class SkippedFile:
    """A path in the project that a pull has left out, or that cannot be read, and why."""

    name: PathText
    reason: Annotated[str, at_most(MAX_REASON)]


@frozen
class NewFilesReply:
    """`time_ns` is when the search began, by the clock of the node's file system, for PulledRequest;
    `complete` is False where there were too many files to look at; `rank_zero`: the node ran rank 0;
    `running` are job ids; `checkpoints`: its parts of sharded ones; `elsewhere`: by the numbers of other
    nodes, the newest files that the last job wrote there and this node lacks."""

    time_ns: Size
    complete: bool
    rank_zero: bool
    running: Annotated[tuple[JobId, ...], at_most(MAX_PLACES)]
    jobs: Annotated[tuple[JobFiles, ...], at_most(MAX_PLACES)]
    left: Annotated[tuple[SkippedFile, ...], at_most(MAX_PLACES)] = ()
    checkpoints: Annotated[tuple[Part, ...], at_most(MAX_PARTS)] = ()
    elsewhere: Annotated[dict[NodeRank, _Names], at_most(MAX_NODES)] = field(default_factory=dict)

    @property
    def outputs(self) -> list[NewFiles]:
        return [job.outputs for job in self.jobs if job.outputs.files]

    @property
    def others(self) -> list[NewFiles]:
        return [job.others for job in self.jobs if job.others.files]


@frozen
class NewFilesRequest:
    """Search for files that were not pulled yet, of one job or ('') of all. `outputs` and `scratch` are paths
    in the project: files below `outputs` are counted apart, files below `scratch` not at all. Without
    `outputs` those count as outputs that a pull takes, up to `limit` bytes. A copy that the node got
    before ranks started does not count if `present`, instances that answer, has the one that wrote it."""

    project: ProjectName
    outputs: tuple[str, ...]
    scratch: tuple[str, ...]
    job: OptionalJobId = ""
    limit: Size = 0
    present: tuple[str, ...] = ()

    STEP = "new_files"
    REPLY = NewFilesReply


@frozen
class PulledRequest:
    """Remember that the paths `names` were pulled as they were at `time_ns` (of a NewFilesReply), all but
    what was `left`."""

    project: ProjectName
    names: tuple[str, ...]
    time_ns: Size
    left: Annotated[tuple[SkippedFile, ...], at_most(MAX_LEFT)] = ()

    STEP = "pulled"
    REPLY = Done

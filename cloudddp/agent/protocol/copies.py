"""Results that a node copies to Amazon S3 by itself: where to, and what has been copied."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from cloudddp.agent.protocol.checkpoints import MAX_PARTS, Part
from cloudddp.agent.protocol.codec import Count, PathText, Size, at_most, within
from cloudddp.agent.protocol.frozen import frozen

MAX_BUCKET = 63  # characters
MAX_KEY = 1024  # bytes of an object's key
MAX_NOTES = 20  # about files; more are counted
MAX_NOTE = 500  # characters
MAX_SECONDS = 1e6
MAX_OUTPUTS = 1000

Note = Annotated[str, at_most(MAX_NOTE)]

# The keys of a node's objects: PREFIX/CLUSTER/JOB/node-R/outputs/PATH and .../logs/PATH.
OUTPUTS, LOGS = "outputs", "logs"
REPORT = "copied.json"  # the last object of a node: its Copied
MTIME, LINK = "mtime-ns", "link"  # metadata of an object: the file's time, the target of a symbolic link


def url_of(bucket: str, prefix: str) -> str:
    return f"s3://{bucket}/{prefix}/"


@frozen
class Destination:
    """Where the nodes copy a job's results when it has ended: objects of `bucket` whose keys begin with
    `prefix` and a slash. `outputs` are the paths in the project that are copied, besides the job's logs;
    without them, what jobs wrote there and not below `scratch`. `limit`: seconds after which a node gives up;
    `patience`: seconds without progress after which it does."""

    bucket: Annotated[str, at_most(MAX_BUCKET)]
    prefix: Annotated[str, at_most(MAX_KEY)]
    outputs: Annotated[tuple[PathText, ...], at_most(MAX_OUTPUTS)]
    limit: Annotated[float, within(0, MAX_SECONDS)]
    patience: Annotated[float, within(0, MAX_SECONDS)]
    scratch: Annotated[tuple[PathText, ...], at_most(MAX_OUTPUTS)] = ()

    @property
    def url(self) -> str:
        return url_of(self.bucket, self.prefix)

    def key(self, node: int, *names: str) -> str:
        return "/".join([self.prefix, f"node-{node}", *names])


class CopyPhase(Enum):
    """Whether a node's results are in S3."""

    COPYING = "copying"
    COMPLETE = "complete"  # all of them
    INCOMPLETE = "incomplete"  # it was given up


@frozen
class Copied:
    """What a node has copied to `url`: `files` of `expected` files, with `size` bytes. `error` is why the
    others are missing, or ''. `notes` are about single files; `left_out` counts those that are not copied
    at all, such as links that leave the outputs. `rank_zero`: the node ran rank 0. `checkpoints`: its
    parts of sharded ones."""

    url: Annotated[str, at_most(2000)]
    phase: CopyPhase
    files: Count = 0
    size: Size = 0
    expected: Count = 0
    left_out: Count = 0
    error: Note = ""
    notes: Annotated[tuple[Note, ...], at_most(MAX_NOTES)] = ()
    rank_zero: bool = False
    checkpoints: Annotated[tuple[Part, ...], at_most(MAX_PARTS)] = ()

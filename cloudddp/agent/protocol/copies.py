"""Results that a node copies to Amazon S3 by itself: where to, and what has been copied."""

from __future__ import annotations

from enum import Enum

from cloudddp.agent.protocol.checkpoints import MAX_PARTS, Part
from cloudddp.agent.protocol.codec import MAX_COUNT, MAX_PATH, MAX_SIZE, check_length, check_range
from cloudddp.agent.protocol.frozen import frozen

MAX_BUCKET = 63  # characters
MAX_KEY = 1024  # bytes of an object's key
MAX_URL = 2000
MAX_NOTES = 20  # about files; more are counted
MAX_NOTE = 500  # characters
MAX_SECONDS = 1e6
MAX_OUTPUTS = 1000

# The keys of a node's objects: PREFIX/CLUSTER/JOB/node-R/outputs/PATH and .../logs/PATH.
OUTPUTS, LOGS = "outputs", "logs"
REPORT = "copied.json"  # the last object of a node: its Copied
MTIME, LINK = "mtime-ns", "link"  # metadata of an object: the file's time, the target of a symbolic link


def node_prefix(prefix: str, node: int) -> str:
    """Return the beginning of the keys of a node's objects, for the Destination.prefix of its job."""
    return f"{prefix}/node-{node}"


def url_of(bucket: str, prefix: str) -> str:
    return f"s3://{bucket}/{prefix}/"


@frozen
class Destination:
    """Where the nodes copy a job's results when it has ended: objects of `bucket` whose keys begin with
    `prefix` and a slash. `outputs` are the paths in the project that are copied, besides the job's logs;
    without them, what jobs wrote there and not below `scratch`. `limit`: seconds after which a node gives up;
    `patience`: seconds without progress after which it does."""

    bucket: str
    prefix: str
    outputs: tuple[str, ...]
    limit: float
    patience: float
    scratch: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_length("bucket", self.bucket, MAX_BUCKET)
        check_length("prefix", self.prefix, MAX_KEY)
        check_length("outputs", self.outputs, MAX_OUTPUTS)
        check_length("scratch", self.scratch, MAX_OUTPUTS)
        for path in (*self.outputs, *self.scratch):
            check_length("a path", path, MAX_PATH)
        check_range("limit", self.limit, 0, MAX_SECONDS)
        check_range("patience", self.patience, 0, MAX_SECONDS)


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

    url: str
    phase: CopyPhase
    files: int = 0
    size: int = 0
    expected: int = 0
    left_out: int = 0
    error: str = ""
    notes: tuple[str, ...] = ()
    rank_zero: bool = False
    checkpoints: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        check_length("url", self.url, MAX_URL)
        check_range("files", self.files, 0, MAX_COUNT)
        check_range("size", self.size, 0, MAX_SIZE)
        check_range("expected", self.expected, 0, MAX_COUNT)
        check_range("left_out", self.left_out, 0, MAX_COUNT)
        check_length("error", self.error, MAX_NOTE)
        check_length("notes", self.notes, MAX_NOTES)
        check_length("checkpoints", self.checkpoints, MAX_PARTS)
        for note in self.notes:
            check_length("a note", note, MAX_NOTE)

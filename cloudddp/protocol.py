"""What the node agent answers: every reply and frame as a frozen record whose values are bounded.

Any rank runs as the login user and can replace the agent, so an answer is whatever a node cares to send. `decode`
turns bytes into one of these records or raises ProtocolError; no other code sees the bytes. The records need
the standard library alone (the agent's Python is 3.9 or newer); only `decode`, the laptop's side, needs msgspec,
which builds nothing that the record has no place for, so that junk costs no memory beyond its own size.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, Iterable, Literal, Optional, Tuple, TypeVar

from cloudddp.standing import Standing
from cloudddp.text import one_line

T = TypeVar("T")

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}\Z")
INTERFACE = re.compile(r"[A-Za-z0-9_.@-]{1,15}\Z")  # Linux: IFNAMSIZ - 1

State = Literal["setup", "starting", "running", "succeeded", "failed", "cancelled", "lost"]
ENDED = ("succeeded", "failed", "cancelled", "lost")
LAUNCHER = -1  # the rank number under which torchrun's own output comes

MAX_REPLY = 4 << 20  # bytes of one reply
MAX_MANIFEST = 16 << 20  # bytes of a reply that holds a manifest: 100,000 files take 12 MB
MAX_LISTING = 8 << 20  # bytes of a list of jobs: 5,000 of 8 ranks
MAX_STATE = 1 << 20  # bytes of one state: 256 ranks take 50 kB
MAX_PIECE = 1 << 16  # bytes of log in one frame
MAX_RANKS = 256  # ranks of one node, as job.nproc_per_node allows
MAX_RANK = 1 << 16
MAX_NODES = 1 << 10
MAX_JOBS = 10_000  # that a node lists
MAX_COUNT = 1 << 53  # what a float still counts exactly
MAX_MOMENT = 1e11  # seconds since the epoch: the year 5138
MAX_PATH = 4096  # bytes (Linux: PATH_MAX)
MAX_PLACES = 20  # that a list of new files names
MAX_TEXT = 1 << 16  # characters of output or of a command


class ProtocolError(ValueError):
    """An answer that no agent of this version sends. The message says what was wrong with it, for a person."""


def decode(data: bytes, kind: type[T], *, limit: int = MAX_REPLY) -> T:
    """Return the record that `data`, JSON in UTF-8, describes. Raises ProtocolError for anything else."""
    import msgspec

    if len(data) > limit:
        raise ProtocolError(f"it is {len(data)} bytes long, more than {limit}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise ProtocolError(one_line(str(error), 200)) from None


def _within(name: str, value: Optional[float], least: float, most: float) -> None:
    if value is not None and not least <= value <= most:  # nan is within nothing
        raise ValueError(f"{name} is out of range")


def _short(name: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise ValueError(f"{name} is too long")


def check_job_id(name: str, text: str) -> None:
    """Raise ValueError for what is no job id: it becomes a part of paths, here and on the nodes."""
    if not JOB_ID.match(text):
        raise ValueError(f"{name} is not a job id")


# A manifest's entry: kind (f: file, l: symbolic link), mode, size in bytes, mtime in ns, link target. Paths travel
# with one character for each of their bytes (latin-1), since they need not be UTF-8.
Entry = Tuple[Literal["f", "l"], int, int, int, str]


@dataclass(frozen=True)
class ProbeReply:
    """What a node sees of itself. `interface` carries the private address, '' where none does; `manifest` is None
    where the project's files are the laptop's."""

    hostname: str
    interface: str
    gpus: int
    cpus: int
    python: str
    free_port: int
    time: float  # seconds since the epoch, by the node's clock
    disk_free: int  # bytes
    timer_state: str  # systemd's ActiveState of the deadline's timer
    timer_next: str  # systemd's NextElapseUSecRealtime, '' where nothing is planned
    running: Tuple[str, ...]  # jobs
    manifest: Optional[Dict[str, Entry]] = None

    def __post_init__(self) -> None:
        if self.interface and not INTERFACE.match(self.interface):
            raise ValueError("interface is not the name of one")
        for name, text, limit in (
            ("hostname", self.hostname, 256),
            ("python", self.python, MAX_PATH),
            ("timer_state", self.timer_state, 64),
            ("timer_next", self.timer_next, 64),
        ):
            _short(name, text, limit)
        if "\0" in self.python:
            raise ValueError("python holds a NUL")
        _within("gpus", self.gpus, 0, MAX_RANKS)
        _within("cpus", self.cpus, 1, 1 << 16)
        _within("free_port", self.free_port, 1, (1 << 16) - 1)
        _within("time", self.time, 0, MAX_MOMENT)
        _within("disk_free", self.disk_free, 0, 1 << 62)
        if len(self.running) > MAX_JOBS:
            raise ValueError("running is too long")
        for job in self.running:
            check_job_id("running", job)
        for path, entry in (self.manifest or {}).items():
            _check_entry(path, entry)

    @property
    def deadline_armed(self) -> bool:
        return self.timer_state == "active" and bool(self.timer_next)


def _check_entry(path: str, entry: Entry) -> None:
    _, mode, size, mtime_ns, link = entry
    _short("a path", path, MAX_PATH)
    _short("a link", link, MAX_PATH)
    if not path or max(path) > "\xff" or max(link, default="\0") > "\xff":
        raise ValueError("a path is not bytes")
    _within("a mode", mode, 0, 0o7777)
    _within("a size", size, 0, 1 << 62)
    _within("a time", mtime_ns, -(1 << 62), 1 << 62)


@dataclass(frozen=True)
class ApplyReply:
    """How many files a sync wrote and deleted."""

    written: int
    deleted: int

    def __post_init__(self) -> None:
        _within("written", self.written, 0, MAX_COUNT)
        _within("deleted", self.deleted, 0, MAX_COUNT)


@dataclass(frozen=True)
class SetupReply:
    """How the set-up commands ended; `command` is the one that failed, with the end of its output. `cancelled`: the
    job was cancelled meanwhile, and nothing of its set-up runs any more."""

    ran: bool
    exit_code: int
    command: str
    output: str
    cancelled: bool = False

    def __post_init__(self) -> None:
        _within("exit_code", self.exit_code, -255, 255)
        _short("command", self.command, MAX_TEXT)
        _short("output", self.output, MAX_TEXT)


@dataclass(frozen=True)
class StartReply:
    """The job's supervisor runs."""

    pid: int

    def __post_init__(self) -> None:
        _within("pid", self.pid, 1, 1 << 31)


@dataclass(frozen=True)
class RankRecord:
    """One rank on its node. Times are seconds since the epoch by that node's clock; `ended` and `exit_code` are None
    while it runs; `signal` is the number of the signal that ended it, or None; `attempt` counts torchrun's restarts."""

    rank: int
    exit_code: Optional[int]
    ended: Optional[float]
    signal: Optional[int] = None
    local_rank: int = 0
    attempt: int = 0
    started: Optional[float] = None
    pid: Optional[int] = None

    def __post_init__(self) -> None:
        _within("rank", self.rank, 0, MAX_RANK)
        _within("exit_code", self.exit_code, 0, 255)
        _within("ended", self.ended, 0, MAX_MOMENT)
        _within("signal", self.signal, 1, 64)
        _within("local_rank", self.local_rank, 0, MAX_RANKS)
        _within("pid", self.pid, 1, 1 << 31)
        _within("attempt", self.attempt, 0, MAX_COUNT)
        _within("started", self.started, 0, MAX_MOMENT)
        if (self.exit_code is None) != (self.ended is None):
            raise ValueError("a rank has an exit code without an end, or an end without an exit code")


@dataclass(frozen=True)
class JobState:
    """A job as one node knows it. `expected` ranks run there when all have started; `stopping` says that somebody is
    ending it, `cancelled` when that was asked for; `error` is why its processes could not be started."""

    job: str
    state: State
    node: Optional[int] = None
    exit_code: Optional[int] = None
    started: Optional[float] = None
    ended: Optional[float] = None
    error: str = ""
    script: str = ""
    expected: Optional[int] = None
    restarts: int = 0
    stopping: bool = False
    ranks: Tuple[RankRecord, ...] = ()
    standing: Optional[Standing] = None
    cancelled: Optional[float] = None

    def __post_init__(self) -> None:
        check_job_id("job", self.job)
        _within("cancelled", self.cancelled, 0, MAX_MOMENT)
        _within("node", self.node, 0, MAX_NODES)
        _within("exit_code", self.exit_code, 0, 255)
        _within("started", self.started, 0, MAX_MOMENT)
        _within("ended", self.ended, 0, MAX_MOMENT)
        _within("expected", self.expected, 0, MAX_RANKS)
        _within("restarts", self.restarts, 0, 1 << 16)
        _short("error", self.error, MAX_TEXT)
        _short("script", self.script, MAX_TEXT)
        if len(self.ranks) > MAX_RANKS:
            raise ValueError("ranks is too long")


@dataclass(frozen=True)
class KillReply:
    """What ending a job came to on a node: processes ended, `ranks` of them, and left in spite of it. `known`: the
    node has the job."""

    known: bool
    ended: int
    left: int
    ranks: int = 0
    state: Optional[State] = None
    standing: Optional[Standing] = None

    def __post_init__(self) -> None:
        _within("ended", self.ended, 0, 1 << 31)
        _within("left", self.left, 0, 1 << 31)
        _within("ranks", self.ranks, 0, MAX_RANKS)


@dataclass(frozen=True)
class Place:
    """New files of one folder (its name ends with '/') or one new file of the project, by its path there."""

    name: str
    files: int
    size: int  # bytes

    def __post_init__(self) -> None:
        _short("name", self.name, MAX_PATH)
        if not self.name or "\0" in self.name:
            raise ValueError("name is not a path")
        _within("files", self.files, 0, MAX_COUNT)
        _within("size", self.size, 0, 1 << 62)


@dataclass(frozen=True)
class Found:
    """How many new files there are, their bytes, and the largest places where they are."""

    files: int
    size: int
    places: Tuple[Place, ...]

    def __post_init__(self) -> None:
        _within("files", self.files, 0, MAX_COUNT)
        _within("size", self.size, 0, 1 << 62)
        if len(self.places) > MAX_PLACES:
            raise ValueError("places is too long")


@dataclass(frozen=True)
class JobFiles:
    """What a job has written on a node and nobody has pulled: below its outputs, and elsewhere in the project."""

    job: str
    outputs: Found
    others: Found

    def __post_init__(self) -> None:
        check_job_id("job", self.job)


@dataclass(frozen=True)
class NewReply:
    """What a node holds that nobody has pulled. `at` is when it was looked at, by the clock of its file system (ns);
    `complete` is False where there were too many files to look at; `rank_zero`: the node ran rank 0."""

    at: int
    complete: bool
    rank_zero: bool
    running: Tuple[str, ...]  # jobs
    jobs: Tuple[JobFiles, ...]

    def __post_init__(self) -> None:
        _within("at", self.at, 0, 1 << 62)
        if len(self.running) > MAX_PLACES or len(self.jobs) > MAX_PLACES:
            raise ValueError("running or jobs is too long")
        for job in self.running:
            check_job_id("running", job)


@dataclass(frozen=True)
class PulledReply:
    """How many names a node has marked as pulled."""

    marked: int

    def __post_init__(self) -> None:
        _within("marked", self.marked, 0, MAX_COUNT)


def failed_first(states: Iterable[JobState]) -> Optional[RankRecord]:
    """Return the rank whose failure came before the cancel of its job, on any node; None where none did."""
    states = tuple(states)
    cancelled = min((one.cancelled for one in states if one.cancelled is not None), default=MAX_MOMENT)
    failed = [
        rank for one in states for rank in one.ranks if rank.exit_code and (rank.ended or 0) < cancelled
    ]
    return min(failed, key=lambda rank: rank.ended or 0, default=None)


# -- frames ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Log:
    """A piece of one rank's log, at its offset in the file. Rank LAUNCHER is torchrun's own output."""

    rank: int
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


@dataclass(frozen=True)
class End:
    """The job has ended on this node, and every byte of its logs was sent."""

"""A node itself, apart from its jobs: what it reports of itself before one starts (`probe`), and when it
powers off once none runs (`poweroff`), or at the deadline (`deadline`)."""

from __future__ import annotations

from enum import Enum
from typing import Optional

from cloudddp.agent.protocol.codec import (
    MAX_PATH,
    MAX_SIZE,
    MAX_TEXT,
    MAX_TIME,
    ProtocolError,
    check_job_id,
    check_length,
    check_origin,
    check_project,
    check_range,
    is_plain,
)
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.manifest import FOLDER_DIGEST, MAX_FILES, check_folder
from cloudddp.agent.protocol.phases import MAX_RUNNING

MAX_POWEROFF_WAIT = 1e8  # seconds


class BootStage(Enum):
    """What the probe of a new node writes to stderr, a line each, as the node gets further."""

    BOOTED = "booted"
    GPUS = "GPUs"

    @property
    def line(self) -> bytes:
        return f"cloudddp: {self.value}\n".encode()


class Change(Enum):
    """What is to be done with the plan of a node."""

    PLAN = "plan"  # for a job that is being launched; it replaces the plan of any other one
    EXTEND = "extend"  # the plan of any job: the node powers off that late, or later
    CHANGE = "change"  # the plan of that job, and of no other


@frozen
class PowerOffReply:
    """The node powers off after `job`, in `left` seconds if no job runs on it; None: it does not. `before`:
    what `left` was before it was changed."""

    job: str = ""
    left: Optional[float] = None
    before: Optional[float] = None

    def __post_init__(self) -> None:
        if self.job:
            check_job_id("job", self.job)
        check_range("left", self.left, 0, MAX_POWEROFF_WAIT)
        check_range("before", self.before, 0, MAX_POWEROFF_WAIT)


@frozen
class PowerOffRequest:
    """Let the node power off in `seconds`. `job`: see Change; '' for EXTEND. Nothing is changed where another
    job runs."""

    change: Change
    seconds: float
    job: str = ""

    STEP = "poweroff"
    REPLY = PowerOffReply

    def __post_init__(self) -> None:
        check_range("seconds", self.seconds, 0, MAX_POWEROFF_WAIT)
        if self.job or self.change is not Change.EXTEND:
            check_job_id("job", self.job)


MAX_INTERFACE = 15  # characters (Linux: IFNAMSIZ - 1)
MAX_FOLDERS = 8 << 20  # bytes of a reply that holds the digests of a project's folders
MAX_GPUS = 256
MAX_EFA = 256
MAX_WAIT = 86_400.0  # seconds


def is_interface(name: str) -> bool:
    return len(name) <= MAX_INTERFACE and is_plain(name, "_.@-")


@frozen
class ProbeReply:
    """`interface` carries the private address, '' if none does. `free_port` and `agent_port` are free, for
    the rendezvous and for the agents of a job. `running` are job ids. `folders` are the digests of the
    project's folders (manifest.py), and None where all are the laptop's or were not requested."""

    interface: str
    gpus: int
    cpus: int
    python: str
    free_port: int
    agent_port: int
    time: float  # seconds since the epoch, by the node's clock
    timer_state: str  # systemd's ActiveState of the deadline timer, '' unless it was asked for
    timer_next: str  # systemd's NextElapseUSecRealtime, '' where none is planned
    running: tuple[str, ...]
    folders: Optional[dict[str, str]] = None  # by path, in wire form
    # GPUs that PyTorch can use; None where it was not asked, or `python` has no torch.
    torch_gpus: Optional[int] = None
    torch_error: str = ""  # why not more
    efa: int = 0  # EFA devices; 0 where the request expects none
    poweroff: Optional[PowerOffReply] = None  # what is planned
    origin: str = ""  # ReceiveRequest.origin of the project's files; "" if it is not known
    version: int = 0  # of the project's files (project_lock.py); 0 where nothing was compared
    wrote: bool = False  # whether earlier jobs wrote anything in the project, or that is not known in time

    def __post_init__(self) -> None:
        if self.interface and not is_interface(self.interface):
            raise ProtocolError("interface is not an interface name")
        if "\0" in self.python:
            raise ProtocolError("python contains a NUL")
        check_length("python", self.python, MAX_PATH)
        check_length("timer_state", self.timer_state, 64)
        check_length("timer_next", self.timer_next, 64)
        check_origin(self.origin)
        check_range("gpus", self.gpus, 0, MAX_GPUS)
        check_range("torch_gpus", self.torch_gpus or 0, 0, MAX_GPUS)
        check_length("torch_error", self.torch_error, MAX_TEXT)
        check_range("efa", self.efa, 0, MAX_EFA)
        check_range("cpus", self.cpus, 1, 1 << 16)
        check_range("free_port", self.free_port, 1, (1 << 16) - 1)
        check_range("agent_port", self.agent_port, 1, (1 << 16) - 1)
        check_range("time", self.time, 0, MAX_TIME)
        check_range("version", self.version, 0, MAX_SIZE)
        check_length("running", self.running, MAX_RUNNING)
        for job in self.running:
            check_job_id("running", job)
        check_length("folders", self.folders or {}, MAX_FILES)
        for path, digest in (self.folders or {}).items():
            check_folder(path)
            check_length("a digest", digest, FOLDER_DIGEST)

    @property
    def deadline_armed(self) -> bool:
        return self.timer_state == "active" and bool(self.timer_next)


@frozen
class ProbeRequest:
    """`manifest_digest` is the digest of the laptop's manifest, '' for no comparison. `python` is job.python,
    '' for the node's default. `boot_seconds` limits the wait for cloud-init, 0 for none. `gpus` is what the
    instance type has; while nvidia-smi lists fewer, it is called again for up to `gpu_seconds`.
    `torch_seconds` limits the import of torch and the use of each GPU, 0 for neither. `efa` is how many EFA
    devices it should have; they are counted if that is not 0. `deadline`: look at the timer of the node's
    deadline. `only_files`: count no GPUs, for which nvidia-smi takes up to seconds."""

    project: str
    private_ip: str
    python: str = ""
    manifest_digest: str = ""
    boot_seconds: float = 0.0
    gpus: int = 0
    gpu_seconds: float = 0.0
    torch_seconds: float = 0.0
    efa: int = 0
    deadline: bool = False
    only_files: bool = False

    STEP = "probe"
    REPLY = ProbeReply

    def __post_init__(self) -> None:
        check_project(self.project)
        check_length("private_ip", self.private_ip, 64)
        check_length("python", self.python, MAX_PATH)
        check_length("manifest_digest", self.manifest_digest, 64)
        check_range("boot_seconds", self.boot_seconds, 0, MAX_WAIT)
        check_range("gpus", self.gpus, 0, MAX_GPUS)
        check_range("efa", self.efa, 0, MAX_EFA)
        check_range("gpu_seconds", self.gpu_seconds, 0, MAX_WAIT)
        check_range("torch_seconds", self.torch_seconds, 0, MAX_WAIT)

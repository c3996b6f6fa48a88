"""A node itself, apart from its jobs: what it reports of itself before one starts (`probe`), and when it
ends once it is unused (`poweroff`)."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Optional

from cloudddp.agent.protocol.codec import (
    JobId,
    OptionalJobId,
    OriginId,
    PathText,
    Port,
    ProjectName,
    ProtocolError,
    ShortText,
    Size,
    Text,
    Time,
    at_most,
    is_plain,
    within,
)
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.phases import MAX_RUNNING

MAX_POWEROFF_WAIT = 1e8  # seconds
CLIENT_SECONDS = 3600.0  # as in infra/node/cloudddp-idle.sh
MAX_GPUS = 256
PoweroffSeconds = Annotated[float, within(0, MAX_POWEROFF_WAIT)]
GpuCount = Annotated[int, within(0, MAX_GPUS)]


class BootStage(Enum):
    """What the probe of a new node writes to stderr, a line each, as the node gets further."""

    BOOTED = "booted"
    GPUS = "GPUs"

    @property
    def line(self) -> bytes:
        return f"cloudddp: {self.value}\n".encode()


@frozen
class PowerOffReply:
    """`job`: after which the node ends by the plan that it has now; '' where it has none."""

    job: OptionalJobId = ""


@frozen
class PowerOffRequest:
    """Let the node end once it has been unused for `seconds`, because of `job`, unless another job runs.
    `clients`: for how many seconds after the last use by a job clients prolong that."""

    job: JobId
    seconds: PoweroffSeconds
    clients: PoweroffSeconds = CLIENT_SECONDS

    STEP = "poweroff"
    REPLY = PowerOffReply


MAX_EFA = 256
MAX_WAIT = 86_400.0  # seconds


def _check_interface(name: str, text: str) -> None:
    if text and (len(text) > 15 or not is_plain(text, "_.@-")):  # Linux: IFNAMSIZ - 1
        raise ProtocolError(f"{name} is not an interface name")


@frozen
class ProbeReply:
    """`interface` carries the private address, '' if none does. `free_port` and `agent_port` are free, for
    the rendezvous and for the agents of a job. `running` are job ids. `differs`: the project's
    files have another digest than was given (manifest.py)."""

    interface: Annotated[str, _check_interface]
    gpus: GpuCount
    cpus: Annotated[int, within(1, 1 << 16)]
    python: PathText
    free_port: Port
    agent_port: Port
    time: Time  # seconds since the epoch, by the node's clock
    timer_state: ShortText  # systemd's ActiveState of the deadline timer, '' unless it was asked for
    timer_next: ShortText  # systemd's NextElapseUSecRealtime, '' where none is planned
    running: Annotated[tuple[JobId, ...], at_most(MAX_RUNNING)]
    differs: bool = False
    # GPUs that PyTorch can use; None where it was not asked, or `python` has no torch.
    torch_gpus: Optional[GpuCount] = None
    torch_error: Text = ""  # why not more
    efa: Annotated[int, within(0, MAX_EFA)] = 0  # EFA devices; 0 where the request expects none
    origin: OriginId = ""  # ReceiveRequest.origin of the project's files; "" if it is not known
    version: Size = 0  # of the project's files (project_lock.py); 0 where nothing was compared
    wrote: bool = False  # whether earlier jobs wrote anything in the project, or that is not known in time

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

    project: ProjectName
    private_ip: ShortText
    python: PathText = ""
    manifest_digest: ShortText = ""
    boot_seconds: Annotated[float, within(0, MAX_WAIT)] = 0.0
    gpus: GpuCount = 0
    gpu_seconds: Annotated[float, within(0, MAX_WAIT)] = 0.0
    torch_seconds: Annotated[float, within(0, MAX_WAIT)] = 0.0
    efa: Annotated[int, within(0, MAX_EFA)] = 0
    deadline: bool = False
    only_files: bool = False

    STEP = "probe"
    REPLY = ProbeReply

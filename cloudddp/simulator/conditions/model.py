"""The record of all conditions, and its JSON form.

In the JSON, a POST to /_cloudddp/conditions, each field of Conditions is a key, as in reading.EXAMPLES (GET
returns the same with all keys present). A body is merged into the current conditions; `null` removes one
entry; `"clear": true` first removes all. What each of them does is in docs/simulator.md.

Conditions that count calls end by themselves and disappear from the response. A body that is invalid in any
part changes nothing and is answered with HTTP 400 and {"error": MESSAGE, "known": [NAMES]}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from typing import Any

QUOTAS = (
    "on-demand-g",  # G and VT
    "on-demand-p",
    "on-demand-standard",
    "spot-g",
    "spot-p",  # P2, P3, P4
    "spot-p5",  # P5, P6
    "spot-standard",
    "addresses",  # Elastic IPs, not vCPUs
)
LISTED_LATE = ("elastic-ip", "instance", "key-pair", "placement-group", "security-group")
NOT_OPTED_IN = "not-opted-in"  # of a region, as in DescribeRegions

_STATE_REASONS = {
    "Server.InsufficientInstanceCapacity": "There was insufficient capacity available to satisfy the launch "
    "request.",
    "Server.InternalError": "An internal error caused the instance to terminate during launch.",
}


@dataclass(frozen=True, slots=True)
class Rejection:
    """An error response for the next `calls` calls of an action, which have no effect."""

    code: str
    message: str = ""
    status: int = 400
    calls: int = 1


@dataclass(frozen=True, slots=True)
class LaunchFailure:
    """The end of some instances of the next `launches` that EC2 accepts. `code`: of their StateReason.

    Without a message, it is that of EC2 (EC2 API reference, "StateReason").
    """

    code: str
    message: str = ""
    instances: int = 1
    launches: int = 1

    @property
    def reason(self) -> str:
        return f"{self.code}: {self.message or _STATE_REASONS.get(self.code, self.code)}"


@dataclass(frozen=True, slots=True)
class Rate:
    """The token bucket of an action in each region: it begins full, each call takes a token, and `refill`
    tokens are added per second (EC2 Developer Guide, "Request throttling for the Amazon EC2 API")."""

    bucket: int
    refill: float


@dataclass(frozen=True, slots=True)
class Block:
    """A capacity block: places for instances of one type in one zone, from its start to its end."""

    zone: str
    type: str
    count: int
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Boot:
    """How slowly and how badly nodes boot that boot from then on. Seconds, except for numbers of GPUs."""

    ssh_seconds: float = 0.0  # from cloud-init's network stage until sshd starts; timers run meanwhile
    nologin_seconds: float = 0.0  # after sshd has started, in which /run/nologin exists
    final_seconds: float = 0.0  # after sshd has started until cloud-init's last stage (runcmd) begins
    apt_lock_seconds: float = 0.0  # after sshd has started, in which another process holds dpkg's lock
    first_import_seconds: float = 0.0  # that the first import of torch on the node takes longer
    failed_gpus: int = 0  # of the GPUs of the type: lost by nvidia-smi, and unusable in PyTorch
    unusable_gpus: int = 0  # likewise, but nvidia-smi lists them, as without a fabric manager
    ssh_socket: int = 0  # 1: systemd's ssh.socket starts sshd; machine nodes only
    no_nfs: int = 0  # 1: exportfs and mount.nfs4 are missing until they are installed; process nodes only


@dataclass(frozen=True, slots=True)
class Link:
    """A wide-area link between the laptop and each node. Applies to each direction by itself."""

    latency: float = 0.0  # seconds of a round trip
    mbit: float = 0.0  # 0: not limited
    loss: float = 0.0  # percent of the packets


@dataclass(frozen=True, slots=True)
class Role:
    """The rules of one role.

    `codes`: those of the caller's MFA device, each valid once; None for a role that does not require MFA.
    `seconds`: the length of a session, of present ones too. `refuse`: nobody may assume it.
    """

    codes: tuple[str, ...] | None = None
    seconds: int | None = None
    refuse: bool = False


@dataclass(frozen=True, slots=True)
class Conditions:
    """All conditions; see the module docstring."""

    capacity: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # zone -> type -> how many more
    spot_capacity: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # likewise, in one launch
    quota: Mapping[str, int] = field(default_factory=dict)  # names: QUOTAS
    free_addresses: Mapping[str, int] = field(default_factory=dict)  # subnet -> how many more
    vpn: Mapping[str, str] = field(default_factory=dict)  # VPC -> the laptop's address
    regions: Mapping[str, str] = field(default_factory=dict)  # region -> NOT_OPTED_IN
    blocks: Mapping[str, Block] = field(default_factory=dict)
    cleanup: Mapping[str, float] = field(default_factory=dict)  # seconds
    efa_devices: Mapping[str, int] = field(default_factory=dict)
    throttle: Mapping[str, int] = field(default_factory=dict)  # action -> calls
    request_rate: Mapping[str, Rate] = field(default_factory=dict)  # action -> token bucket
    lose: Mapping[str, int] = field(default_factory=dict)  # action -> calls
    lingering: Mapping[str, float] = field(default_factory=dict)  # seconds
    unlisted: Mapping[str, float] = field(default_factory=dict)  # kind -> seconds (LISTED_LATE)
    latency: Mapping[str, float] = field(default_factory=dict)  # seconds; "*": all others
    fail_launch: Mapping[str, LaunchFailure] = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)  # USD per hour on demand
    spot_prices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    reject: Mapping[str, Rejection] = field(default_factory=dict)
    link: Mapping[str, float] = field(default_factory=dict)
    boot: Mapping[str, float] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)
    clock: Mapping[str, int] = field(default_factory=dict)

    @property
    def next_boot(self) -> Boot:
        """How a node boots that starts now."""
        return Boot(**self.boot)  # type: ignore[arg-type]  # checked by reading.merge

    @property
    def laptop_link(self) -> Link | None:
        """The link between laptop and nodes; None if there is none but the computer itself."""
        return Link(**self.link) if self.link else None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; `merge(Conditions(), to_json(), names)` returns the same conditions."""
        return {entry.name: _plain(getattr(self, entry.name)) for entry in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value

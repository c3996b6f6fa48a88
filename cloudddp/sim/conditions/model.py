"""The record of all conditions, and its JSON form.

The JSON, in a POST to /_cloudddp/conditions (GET returns the same with all keys present). A body is merged
into the current conditions; `null` removes one entry; `"clear": true` first removes all:

    {"clear": true,
     "capacity": {"us-east-1a": {"p5.48xlarge": 2}}, how many more fit; stopped and terminated ones free a
     place "quota": {"on-demand-g": 64, "addresses": 5}, vCPUs at once in a region (names: QUOTAS); Elastic
     IPs "free_addresses": {"subnet-0123456789abcdef0": 3}, how many more private addresses the subnet has
     "vpn": {"vpc-0123456789abcdef0": "10.8.0.10"}, the laptop reaches private addresses, as 10.8.0.10
     "blocks": {"cr-0123456789abcdef0": { capacity blocks that the account has bought
                            "zone": "us-east-1a", "type": "p5.48xlarge", "count": 2,
                            "start": "2026-11-20T11:30:00Z", "end": "2026-11-22T11:30:00Z"}},
     "cleanup": {"reservations": 120}, seconds until the place of an ended instance is free again
     "efa_devices": {"p4d.24xlarge": 3}, new nodes show at most this many EFA devices "throttle":
     {"RunInstances": 2}, the next calls fail with RequestLimitExceeded, no effect "lose": {"RunInstances":
     1}, the next calls take effect, and their response is lost "unlisted": {"elastic-ip": 2}, seconds in
     which a filter by tag omits new ones (LISTED_LATE) "latency": {"*": 0.1, "RunInstances": 2.5}, seconds
     before a call starts; "*" for all others "fail_launch": {"us-east-1a": {"code":
     "Server.InsufficientInstanceCapacity", "instances": 1, "launches": 1}},
                       the next launches in a zone succeed, and so many of their instances terminate instead
                       of running
     "prices": {"g5.xlarge": 1.5}, USD per hour on demand, in every region (Pricing API) "spot_prices":
     {"us-east-1a": {"g5.xlarge": 0.4}}, USD per hour "reject": {"RunInstances": {"code":
     "UnauthorizedOperation", "message": "", "status": 403, "calls": 1}}, "link": {"latency": 0.05, "mbit":
     200, "loss": 5}, between laptop and nodes; null removes it "boot": {"ssh_seconds": 60}, of the nodes that
     boot from then on "roles": {"arn:aws:iam::123456789012:role/x": {"codes": ["123456"], "seconds": 900}},
     see Role "clock": {"ahead": 900}} seconds by which AWS's clock is ahead of this computer's

Conditions that count calls end by themselves and disappear from the response. A body that is invalid in any
part changes nothing and is answered with HTTP 400 and {"error": MESSAGE, "known": [NAMES]}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
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
LISTED_LATE = ("elastic-ip", "key-pair", "placement-group", "security-group")


@dataclass(frozen=True, slots=True)
class Rejection:
    """An error response for the next `calls` calls of an action, which have no effect."""

    code: str
    message: str = ""
    status: int = 400
    calls: int = 1


@dataclass(frozen=True, slots=True)
class LaunchFailure:
    """The end of some instances of the next `launches` that EC2 accepts. `code`: of their StateReason."""

    code: str
    message: str = ""
    instances: int = 1
    launches: int = 1


@dataclass(frozen=True, slots=True)
class Block:
    """A capacity block: places for instances of one type in one zone, from its start to its end."""

    zone: str
    instance_type: str
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

    def to_json(self) -> dict[str, Any]:
        codes = None if self.codes is None else list(self.codes)
        return {"codes": codes, "seconds": self.seconds, "refuse": self.refuse}


@dataclass(frozen=True, slots=True)
class Conditions:
    """All conditions; see the module docstring."""

    capacity: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    quota: Mapping[str, int] = field(default_factory=dict)
    free_addresses: Mapping[str, int] = field(default_factory=dict)
    vpn: Mapping[str, str] = field(default_factory=dict)
    blocks: Mapping[str, Block] = field(default_factory=dict)
    cleanup: Mapping[str, float] = field(default_factory=dict)
    efa_devices: Mapping[str, int] = field(default_factory=dict)
    throttle: Mapping[str, int] = field(default_factory=dict)
    lose: Mapping[str, int] = field(default_factory=dict)
    unlisted: Mapping[str, float] = field(default_factory=dict)
    latency: Mapping[str, float] = field(default_factory=dict)
    fail_launch: Mapping[str, LaunchFailure] = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)
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
        plain = {entry.name: dict(getattr(self, entry.name)) for entry in fields(self)}
        for key in ("capacity", "spot_prices"):
            plain[key] = {zone: dict(types) for zone, types in getattr(self, key).items()}
        plain["fail_launch"] = {zone: asdict(rule) for zone, rule in self.fail_launch.items()}
        plain["reject"] = {action: asdict(rule) for action, rule in self.reject.items()}
        plain["roles"] = {arn: role.to_json() for arn, role in self.roles.items()}
        plain["blocks"] = {
            name: {
                "zone": block.zone,
                "type": block.instance_type,
                "count": block.count,
                "start": _iso(block.start),
                "end": _iso(block.end),
            }
            for name, block in self.blocks.items()
        }
        return plain


def _iso(time: datetime) -> str:
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")

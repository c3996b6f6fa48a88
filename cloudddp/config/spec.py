"""What the user asked for, as frozen records: ClusterSpec, JobSpec, SyncSpec and SetupSpec, and what their
settings mean together. Pure.

Each field has its type and its limits; its help is in descriptions.py, that of a section its docstring.
settings.py merges the sources and validates the values.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from msgspec import Meta

from cloudddp.config import gpus
from cloudddp.errors import UsageError

MAX_WAIT = 14 * 86400  # seconds
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def limited(*, allowed: str = "", **limits: Any) -> Meta:
    """Return limits of a value, as msgspec checks them. `allowed`: a pattern in words, for messages and the
    reference."""
    return Meta(extra={"allowed": allowed} if allowed else None, **limits)


Relative = Annotated[
    str,
    limited(
        allowed="a relative path inside the project, without '..'",
        pattern=r"^(?!/)(?!~)(?!(.*/)?\.\.(/|$)).+\Z",
    ),
]


def seconds_of(text: str) -> float:
    """Return the seconds of a valid time: 0, 45s, 30m, 2h, 1d. 0.0 for anything else."""
    found = re.fullmatch(r"([0-9]+)([smhd])", text)
    return float(int(found[1]) * _UNITS[found[2]]) if found else 0.0


MAX_NODES = 256  # in one RunInstances call, which starts all or none; AWS recommends several calls above 100

_S3 = (
    r"s3://(?!xn--)(?!\d+\.\d+\.\d+\.\d+(/|\Z))(?!.{0,63}\.\.)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
    r"(/(?!/)(?!(.*/)?\.{1,2}(/|\Z))(?!.*//)[A-Za-z0-9!_.*'()=+@/-]{0,440})?"
)

Name = Annotated[
    str,
    limited(
        allowed="1 to 40 of a-z, 0-9 and '-', starting with a letter or digit",
        pattern=r"^[a-z0-9][a-z0-9-]{0,39}\Z",
    ),
]
Extra = Annotated[str, limited(allowed="the name of an extra", pattern=r"^[A-Za-z0-9][\w.-]*\Z")]
Region = Annotated[
    str, limited(allowed="an AWS region such as us-east-1", pattern=r"^[a-z]{2,5}(-[a-z]+)+-\d\Z")
]
Zone = Annotated[
    str,
    limited(
        allowed="an availability zone such as us-east-1a, or a Local Zone such as us-west-2-lax-1a",
        pattern=r"^[a-z]{2,5}(-[a-z]+)+-\d(-[a-z]+-\d+)?[a-z]\Z",
    ),
]
Image = Annotated[
    str, limited(allowed="an image such as pytorch/pytorch", pattern=r"^[A-Za-z0-9][\w./:@-]{0,254}\Z")
]
Subnet = Annotated[
    str,
    limited(
        allowed="an id such as subnet-0abc, or a tag such as tag:Name=private",
        pattern=r"^(subnet-[0-9a-f]+|tag:[^=\0]{1,128}=[^\0]{0,256})\Z",
    ),
]


NOTIFY = (
    "https://HOST/... (http:// with localhost) without a user name, '$NAME' for a variable of the job, or a "
    "command of one line and at most 2000 characters"
)
_NOTIFY = (
    r"(https://([A-Za-z0-9._-]+|\[[0-9a-f:]+\])|http://(localhost|127(\.\d+){3}))(:\d+)?([/?][!-~]{0,1900})?"
    r"|(?![A-Za-z][A-Za-z0-9+.-]*://)(?=.*\S)[^\x00-\x1f\x7f]{1,2000}"
)
# A setting, '' for all; what a text of it is like; why it is not allowed.
_REASONS = (
    ("", r"\s*", "it is empty"),
    ("instance_type", r"(.*,)?\s*(,.*)?", "there is nothing beside a comma"),
    ("", r"\s.*|.*\s", "it begins or ends with a space"),
    ("notify", r"\w+://[^/]*@.*", "the URL has a user name"),
    ("notify", r"http://.*", "http:// is for localhost"),
    ("notify", r"(?!https:)\w+://.*", "the URL does not begin with https://"),
)


def why_not(key: str, value: Any) -> str:
    """Return why a text is not allowed, to append to a message; '' where what is allowed says it."""
    text = value if isinstance(value, str) else "-"
    reasons = (why for name, like, why in _REASONS if name in ("", key) and re.fullmatch(like, text, re.S))
    return f": {found}" if (found := next(reasons, "")) else ""


_TYPE = r"[a-z][a-z0-9-]*\.[a-z0-9-]+"
_GPU = r"[A-Za-z0-9-]{1,20}(:[1-9]\d?)?"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The cluster's name, how many nodes it has, of which types, and where they run."""

    name: Name = "default"
    nodes: Annotated[int, limited(ge=1, le=MAX_NODES)] = 2
    instance_type: Annotated[
        str,
        limited(
            allowed="an EC2 instance type such as g5.xlarge, up to 10 of them, or a GPU: A10G, H100:8",
            pattern=rf"^({_TYPE}(,{_TYPE}){{0,9}}|{_GPU})\Z",
        ),
    ] = "g5.xlarge"
    spot: Annotated[bool | Literal["prefer"], limited(allowed="true, false or 'prefer'")] = False
    reservation: (
        Annotated[str, limited(allowed="an id such as cr-0123456789abcdef0", pattern=r"^cr-[0-9a-f]{8,17}\Z")]
        | None
    ) = None
    placement_group: bool = True
    efa: bool = True
    require_efa: bool = False
    allow_cpu: bool = False
    region: Region | None = None
    regions: Annotated[tuple[Region, ...], limited(max_length=20)] = ()
    zones: Annotated[tuple[Zone, ...], limited(max_length=50)] = ()
    wait_capacity: Annotated[
        str,
        limited(
            allowed="0, or a time such as 45s, 30m, 2h or 1d (at most 14d)",
            pattern=r"^(0|[1-9]\d{0,5}[smhd])\Z",
        ),
    ] = "0"
    vpc: (
        Annotated[
            str,
            limited(
                allowed="an id such as vpc-0abc, or a tag such as tag:Name=training",
                pattern=r"^(vpc-[0-9a-f]+|tag:[^=\0]{1,128}=[^\0]{0,256})\Z",
            ),
        ]
        | None
    ) = None
    subnets: Annotated[tuple[Subnet, ...], limited(max_length=50)] = ()

    @property
    def types(self) -> tuple[str, ...]:
        """The instance types that would do, in order. All nodes are of one of them."""
        return gpus.types(self.instance_type) or tuple(dict.fromkeys(self.instance_type.split(",")))

    @property
    def title(self) -> str:
        """Nodes and types, for messages: 2 x p5.48xlarge or p4d.24xlarge."""
        return f"{self.nodes} x {' or '.join(self.types)}"

    @property
    def label(self) -> str:
        """Type and market of a candidate."""
        return f"{self.instance_type} {'spot' if self.spot else 'on demand'}"

    @property
    def candidates(self) -> tuple[Self, ...]:
        """The settings for each type and market, in the order of the list: a type's spot instances before its
        on-demand ones."""
        markets = (True, False) if self.spot == "prefer" else (self.spot,)
        return tuple(
            replace(self, instance_type=one, spot=market) for one in self.types for market in markets
        )


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """When the nodes terminate, and what they may cost."""

    max_hours: Annotated[float, limited(gt=0, le=336)] = 8.0
    idle_minutes: Annotated[
        float,
        limited(allowed="0, or a number from 5 to 20160", ge=0, le=20160),
    ] = 60.0
    max_cost: Annotated[float, limited(gt=0, le=1e7)] | None = None
    price: Annotated[float, limited(gt=0, le=1e4)] | None = None
    ready_minutes: Annotated[float, limited(gt=0, le=120)] | None = None


@dataclass(frozen=True, kw_only=True)
class Access:
    """How this computer reaches the nodes."""

    user: Annotated[str, limited(allowed="a Unix user name", pattern=r"^[a-z_][a-z0-9_-]{0,31}\Z")] | None = (
        None
    )
    ssh_port: Annotated[int, limited(ge=1, le=65535)] = 22
    ssh_from: tuple[
        Annotated[
            str, limited(allowed="a CIDR block such as 203.0.113.7/32", pattern=r"^[0-9a-fA-F:.]+/\d{1,3}\Z")
        ],
        ...,
    ] = ()
    connect: Literal["public", "private", "jump"] | None = None
    proxy_jump: (
        Annotated[
            str,
            limited(
                allowed="[user@]host[:port]",
                pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,63}@)?"
                r"([A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[[0-9a-fA-F:.]+\])(:\d{1,5})?\Z",
            ),
        ]
        | None
    ) = None
    proxy_command: (
        Annotated[
            str,
            limited(
                allowed="a command line of at most 2000 characters", pattern=r"^[^\x00-\x1f\x7f]{1,2000}\Z"
            ),
        ]
        | None
    ) = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What each node is created with: its image, disk, role and tags."""

    image: Annotated[
        str,
        limited(
            allowed="an image id (ami-...) or the name of an SSM parameter (/...)",
            pattern=r"^(ami-[0-9a-f]+|/[A-Za-z0-9_.{}/-]+)\Z",
        ),
    ] = "/aws/service/deeplearning/ami/{arch}/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"
    disk_gb: Annotated[int, limited(ge=8, le=16384)] = 150
    disk_throughput: Annotated[int, limited(ge=125, le=2000)] = 500
    volume_init_rate: Annotated[int, limited(ge=100, le=300)] | None = None
    kms_key: (
        Annotated[
            str,
            limited(
                allowed="a key id, alias/NAME, or the ARN of one of them",
                pattern=r"^(arn:aws[a-z-]*:kms:[a-z0-9-]{1,30}:\d{12}:"
                r"(key/(mrk-)?[0-9a-f-]{32,36}|alias/[A-Za-z0-9/_-]{1,250})"
                r"|alias/[A-Za-z0-9/_-]{1,250}|(mrk-)?[0-9a-f-]{32,36})\Z",
            ),
        ]
        | None
    ) = None
    instance_profile: (
        Annotated[
            str,
            limited(
                allowed="the name or ARN of an instance profile",
                pattern=r"^(arn:aws[a-z-]*:iam::\d{12}:instance-profile/([\x21-\x7e]{1,510}/)?)?"
                r"[A-Za-z0-9_+=,.@-]{1,128}\Z",
            ),
        ]
        | None
    ) = None
    imds_hop_limit: Literal[1, 2] = 1
    tags: Annotated[dict[str, str], limited(allowed="a table of KEY = 'value'")] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClusterSpec(Machine, Access, Lifetime, Placement):
    """[cluster]: the nodes, where they run, and when they terminate."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """[job]: how ranks are started."""

    nproc_per_node: Annotated[
        Literal["gpu"] | Annotated[int, Meta(ge=1, le=256)] | tuple[Annotated[int, Meta(ge=1, le=256)], ...],
        limited(allowed="a whole number from 1 to 256, a list of such numbers (one per node), or 'gpu'"),
    ] = "gpu"
    rendezvous: Literal["c10d", "static", "direct"] = "c10d"
    positional_ranks: bool = False
    master_port: Annotated[int, limited(ge=0, le=65535)] = 0
    max_restarts: Annotated[int, limited(ge=0, le=100)] = 0
    torchrun_args: tuple[str, ...] = ()
    python: str = ""
    container: Image | None = None
    stop_grace: Annotated[float, limited(ge=0, le=600)] = 10.0
    save_minutes: Annotated[float, limited(ge=0, le=15)] = 3.0
    retries: Annotated[int, limited(ge=0, le=100)] = 0
    nodes_min: Annotated[int, limited(ge=1, le=1024)] | None = None
    preflight: bool = True
    heartbeat: Annotated[float, limited(ge=2, le=600)] = 15.0
    stall_minutes: Annotated[float, limited(ge=0, le=10_000)] = 10.0
    on_stall: Literal["kill", "restart", "leave", "down"] = "kill"
    log_mb: Annotated[int, limited(ge=1, le=1 << 20)] = 1024
    outputs: tuple[Relative, ...] = ()
    pull_mb: Annotated[float, limited(gt=0, le=1e7)] = 2048.0
    snapshots: tuple[Relative, ...] = ()
    share: tuple[Relative, ...] = ()
    share_mb: Annotated[float, limited(ge=0, le=1e7)] = 2048.0
    scratch: tuple[Relative, ...] = ()
    results_s3: (
        Annotated[
            str,
            limited(
                allowed="s3://BUCKET or s3://BUCKET/PREFIX, of at most 512 letters, digits and !-_.*'()=+@/",
                pattern=rf"^{_S3}\Z",
            ),
        ]
        | None
    ) = None
    notify: Annotated[str, limited(allowed=NOTIFY, pattern=rf"^({_NOTIFY})\Z")] | None = None
    env: dict[str, str] = field(default_factory=dict)

    @property
    def notify_target(self) -> str:
        """The URL or command of job.notify, '' for none: the value of the variable that it names. Raises
        UsageError, without a value: it may be a secret."""
        named = re.fullmatch(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", self.notify or "", re.ASCII)
        if named is None:
            return self.notify or ""
        name = named[1] or named[2]
        what = f"job.notify is the variable {name}"
        if name not in self.env:
            hint = f"give it with -e {name} or --env-file FILE"
            raise UsageError(f"{what}, which the job does not have", hint=hint)
        if not re.fullmatch(_NOTIFY, value := self.env[name]):
            raise UsageError(
                f"{what}, whose value is not allowed{why_not('notify', value)}", hint=f"allowed: {NOTIFY}"
            )
        return value

    @property
    def not_sent(self) -> tuple[str, ...]:
        """Paths of the project that belong to the nodes: a sync leaves them alone."""
        return self.outputs or ("runs",)


@dataclass(frozen=True, kw_only=True)
class SyncSpec:
    """[sync]: which files are sent to the nodes."""

    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    max_mb: Annotated[float, limited(gt=0, le=1e7)] = 512.0


@dataclass(frozen=True, kw_only=True)
class SetupSpec:
    """[setup]: packages and commands, installed and run on every node in the project's folder, after the
    sync, and again only when something changes that they read."""

    environment: (
        Annotated[
            str,
            limited(
                allowed="the path in the project of a requirements file (.txt), pyproject.toml, uv.lock or "
                "environment.yml",
                pattern=r"^(?!/)(?!~)(?!(.*/)?\.\.(/|$))"
                r"(.+\.txt|(.+/)?(pyproject\.toml|uv\.lock)|.+\.ya?ml)\Z",
            ),
        ]
        | None
    ) = None
    extras: tuple[Extra, ...] = ()
    wheels: Relative | None = None
    run: tuple[str, ...] = ()
    inputs: tuple[Relative, ...] = ()


RESULTS = "results"  # where `pull` puts them; never sent to the nodes
DATA = "CLOUDDDP_DATA_"  # beginning of the variables of [[data]], which ranks have


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """[[data]]: folders that jobs read; the section may be repeated. They do not count against sync.max_mb,
    and the variable `CLOUDDDP_DATA_PATH`, with the path in capitals, has where a folder is on the nodes."""

    source: Annotated[
        str,
        limited(
            allowed="a folder on this computer, or s3://BUCKET/PREFIX as for job.results_s3",
            pattern=rf"^({_S3}|(?!s3:)[^\x00-\x1f\x7f]{{1,1000}})\Z",
        ),
    ]
    path: Relative | None = None
    mode: Literal["copy"] = "copy"

    @property
    def is_s3(self) -> bool:
        return self.source.startswith("s3://")

    @property
    def place(self) -> str:
        """The path in the project where ranks find it."""
        source = posixpath.normpath(self.path or self.source.removeprefix("s3://"))
        inside = self.path or not (self.is_s3 or source.startswith(("/", "~", "..")))
        return source if inside else posixpath.basename(source)

    @property
    def variable(self) -> str:
        """The environment variable that has its absolute path on the nodes."""
        return DATA + re.sub(r"[^A-Z0-9]+", "_", self.place.upper()).strip("_")


NODE_0 = "node0"  # as the source of a shared folder


@dataclass(frozen=True, kw_only=True)
class SharedSpec:
    """[[shared]]: folders that all nodes read and write; the section may be repeated."""

    path: Relative
    source: Annotated[
        str,
        limited(
            allowed="node0, or the id of an EFS or FSx for Lustre file system, such as fs-0123456789abcdef0",
            pattern=rf"^({NODE_0}|fs-[0-9a-f]{{8,40}})\Z",
        ),
    ] = NODE_0

    @property
    def place(self) -> str:
        return posixpath.normpath(self.path)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings."""

    cluster: ClusterSpec = ClusterSpec()
    job: JobSpec = JobSpec()
    sync: SyncSpec = SyncSpec()
    setup: SetupSpec = SetupSpec()
    data: tuple[DataSpec, ...] = ()
    shared: tuple[SharedSpec, ...] = ()

    @property
    def links(self) -> tuple[str, ...]:
        """Paths in the project that are links on the nodes."""
        return (*(one.place for one in self.data if one.is_s3), *(one.place for one in self.shared))

    @property
    def data_paths(self) -> dict[str, str]:
        """Variable -> path in the project, of [[data]]."""
        return {one.variable: one.place for one in self.data}


def connection_mode(spec: Access) -> str:
    """Return which address of a node is used, as `connect` has it. Only `public` nodes have a public address.

    A proxy command alone needs none: AWS's Session Manager and EC2 Instance Connect Endpoints reach private
    nodes.
    """
    if spec.connect is not None:
        return spec.connect
    if spec.proxy_jump is not None:
        return "jump"
    return "private" if spec.proxy_command is not None else "public"

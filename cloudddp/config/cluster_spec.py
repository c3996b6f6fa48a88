"""[cluster] as frozen records: ClusterSpec, and the parts of it that most functions take. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Self

from cloudddp.config import gpus
from cloudddp.config.values import limited

MAX_WAIT = 14 * 86400  # seconds
MAX_NODES = 256  # in one RunInstances call, which starts all or none; AWS recommends several calls above 100

Name = Annotated[
    str,
    limited(
        allowed="1 to 40 of a-z, 0-9 and '-', starting with a letter or digit",
        pattern=r"^[a-z0-9][a-z0-9-]{0,39}\Z",
    ),
]
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
Subnet = Annotated[
    str,
    limited(
        allowed="an id such as subnet-0abc, or a tag such as tag:Name=private",
        pattern=r"^(subnet-[0-9a-f]+|tag:[^=\0]{1,128}=[^\0]{0,256})\Z",
    ),
]


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

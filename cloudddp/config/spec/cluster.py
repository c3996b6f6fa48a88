"""[cluster]: the nodes, where they run, and when they terminate."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from cloudddp.config.spec.limits import limited

MAX_NODES = 256  # in one RunInstances call, which starts all or none; AWS recommends several calls above 100

Name = Annotated[
    str,
    limited(
        "Name of the cluster: the value of its `cloudddp:cluster` tag. Default: made from the name of the project's folder.",
        allowed="1 to 40 of a-z, 0-9 and '-', starting with a letter or digit",
        pattern=r"^[a-z0-9][a-z0-9-]{0,39}\Z",
    ),
]
Region = Annotated[
    str,
    limited(
        "",
        allowed="an AWS region such as us-east-1",
        pattern=r"^[a-z]{2,5}(-[a-z]+)+-\d\Z",
    ),
]
Zone = Annotated[
    str,
    limited(
        "",
        allowed="an availability zone such as us-east-1a",
        pattern=r"^[a-z]{2,5}(-[a-z]+)+-\d[a-z]\Z",
    ),
]
Subnet = Annotated[
    str,
    limited(
        "",
        allowed="an id such as subnet-0abc, or a tag such as tag:Name=private",
        pattern=r"^(subnet-[0-9a-f]+|tag:[^=\0]{1,128}=[^\0]{0,256})\Z",
    ),
]


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """[cluster]: the nodes, where they run, and when they terminate."""

    name: Name = "default"
    nodes: Annotated[int, limited("Number of nodes.", ge=1, le=MAX_NODES)] = 2
    instance_type: Annotated[
        str,
        limited(
            "EC2 instance type of every node.",
            allowed="an EC2 instance type such as g5.xlarge",
            pattern=r"^[a-z][a-z0-9-]*\.[a-z0-9-]+\Z",
        ),
    ] = "g5.xlarge"
    max_hours: Annotated[
        float,
        limited("Nodes terminate after this many hours. This cannot be switched off.", gt=0, le=336),
    ] = 8.0
    idle_minutes: Annotated[
        float,
        limited(
            "A node that had no job and no SSH connection for so many minutes terminates by itself; 0 switches this off.",
            allowed="0, or a number from 5 to 20160",
            ge=0,
            le=20160,
        ),
    ] = 0.0
    max_cost: (
        Annotated[
            float,
            limited(
                "Maximum cost of the cluster in USD, enforced as an earlier deadline.",
                gt=0,
                le=1e7,
            ),
        ]
        | None
    ) = None
    price: (
        Annotated[
            float,
            limited(
                "USD per node and hour, for an instance type whose price cloudddp does not know.",
                gt=0,
                le=1e4,
            ),
        ]
        | None
    ) = None
    spot: Annotated[bool, limited("Use spot instances (cheaper; AWS may interrupt them at any time).")] = (
        False
    )
    reservation: (
        Annotated[
            str,
            limited(
                "Id of an on-demand capacity reservation or a capacity block to launch into.",
                allowed="an id such as cr-0123456789abcdef0",
                pattern=r"^cr-[0-9a-f]{8,17}\Z",
            ),
        ]
        | None
    ) = None
    placement_group: Annotated[
        bool,
        limited("Place two nodes or more close together, in a placement group of strategy cluster."),
    ] = True
    efa: Annotated[
        bool,
        limited("Use EFA between two nodes or more, on all network cards, if the instance type has it."),
    ] = True
    require_efa: Annotated[
        bool,
        limited("Fail if EFA is missing: on the instance type, on a node, or when a rank starts NCCL."),
    ] = False
    allow_cpu: Annotated[bool, limited("Accept nodes without a GPU, or with defective ones.")] = False
    region: (
        Annotated[
            str,
            limited(
                "AWS region. Default: AWS_REGION, or that of the AWS profile.",
                allowed="an AWS region such as us-east-1",
                pattern=r"^[a-z]{2,5}(-[a-z]+)+-\d\Z",
            ),
        ]
        | None
    ) = None
    regions: Annotated[
        tuple[Region, ...],
        limited(
            "Regions in which `up` looks for capacity, in this order. Other commands use the one where the cluster is.",
            max_length=20,
        ),
    ] = ()
    zones: Annotated[
        tuple[Zone, ...],
        limited(
            "Availability zones in which `up` looks for capacity, in this order. All nodes are in one zone. "
            "Default: every zone that offers the type and has a subnet with enough free addresses.",
            max_length=50,
        ),
    ] = ()
    wait_capacity: Annotated[
        str,
        limited(
            "How long `up` keeps trying if no zone has capacity, such as 30m or 2h. 0 does not wait. Nothing runs between two "
            "attempts; a launch that AWS accepts and then ends is billed, and counts against max_cost.",
            allowed="0, or a time such as 45s, 30m, 2h or 1d (at most 14d)",
            pattern=r"^(0|[1-9]\d{0,5}[smhd])\Z",
        ),
    ] = "0"
    vpc: (
        Annotated[
            str,
            limited(
                "VPC: an id, or tag:KEY=VALUE. Default: that of the subnets, or the default VPC.",
                allowed="an id such as vpc-0abc, or a tag such as tag:Name=training",
                pattern=r"^(vpc-[0-9a-f]+|tag:[^=\0]{1,128}=[^\0]{0,256})\Z",
            ),
        ]
        | None
    ) = None
    subnets: Annotated[
        tuple[Subnet, ...],
        limited(
            "Subnets of one VPC, by id or tag:KEY=VALUE, in the order in which `up` looks for capacity. "
            "Default: those of the VPC.",
            max_length=50,
        ),
    ] = ()
    image: Annotated[
        str,
        limited(
            "AMI id, or an SSM parameter that holds one; {arch} becomes x86_64 or arm64.",
            allowed="an image id (ami-...) or the name of an SSM parameter (/...)",
            pattern=r"^(ami-[0-9a-f]+|/[A-Za-z0-9_.{}/-]+)\Z",
        ),
    ] = "/aws/service/deeplearning/ami/{arch}/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"
    user: (
        Annotated[
            str,
            limited(
                "Login user. Default: that of the image's operating system.",
                allowed="a Unix user name",
                pattern=r"^[a-z_][a-z0-9_-]{0,31}\Z",
            ),
        ]
        | None
    ) = None
    ssh_port: Annotated[int, limited("Port of the nodes' SSH server.", ge=1, le=65535)] = 22
    ssh_from: Annotated[
        tuple[
            Annotated[
                str,
                limited(
                    "",
                    allowed="a CIDR block such as 203.0.113.7/32",
                    pattern=r"^[0-9a-fA-F:.]+/\d{1,3}\Z",
                ),
            ],
            ...,
        ],
        limited("CIDR blocks that may connect with SSH. Default: this computer's address only."),
    ] = ()
    connect: (
        Annotated[
            Literal["public", "private", "jump"],
            limited(
                "How SSH reaches the nodes: by public address, by private address (VPN), or by proxy_jump."
            ),
        ]
        | None
    ) = None
    proxy_jump: (
        Annotated[
            str,
            limited(
                "Jump host for SSH to private nodes, as for `ssh -J`; its host key must be in your known_hosts.",
                allowed="[user@]host[:port]",
                pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,63}@)?([A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[[0-9a-fA-F:.]+\])(:\d{1,5})?\Z",
            ),
        ]
        | None
    ) = None
    proxy_command: (
        Annotated[
            str,
            limited(
                "Command that connects to a node's SSH server, as ssh's ProxyCommand: %h is the instance id, %a the address.",
                allowed="a command line of at most 2000 characters",
                pattern=r"^[^\x00-\x1f\x7f]{1,2000}\Z",
            ),
        ]
        | None
    ) = None
    disk_gb: Annotated[int, limited("Size of the root volume in GiB (gp3, encrypted).", ge=8, le=16384)] = 150
    disk_throughput: Annotated[
        int,
        limited(
            "Throughput of the root volume in MiB/s: a new volume is read from its snapshot at first. Above 125, each MiB/s "
            "costs about $0.04 a month, above 750 about $0.06; the price includes it.",
            ge=125,
            le=2000,
        ),
    ] = 500
    kms_key: (
        Annotated[
            str,
            limited(
                "KMS key of the root volume: an id, alias/NAME or an ARN. Default: the account's key for EBS.",
                allowed="a key id, alias/NAME, or the ARN of one of them",
                pattern=r"^(arn:aws[a-z-]*:kms:[a-z0-9-]{1,30}:\d{12}:(key/(mrk-)?[0-9a-f-]{32,36}|alias/[A-Za-z0-9/_-]{1,250})"
                r"|alias/[A-Za-z0-9/_-]{1,250}|(mrk-)?[0-9a-f-]{32,36})\Z",
            ),
        ]
        | None
    ) = None
    instance_profile: (
        Annotated[
            str,
            limited(
                "Instance profile of the nodes, by name or ARN: jobs get the permissions of its role. Default: none.",
                allowed="the name or ARN of an instance profile",
                pattern=r"^(arn:aws[a-z-]*:iam::\d{12}:instance-profile/([\x21-\x7e]{1,510}/)?)?[A-Za-z0-9_+=,.@-]{1,128}\Z",
            ),
        ]
        | None
    ) = None
    imds_hop_limit: Annotated[
        Literal[1, 2],
        limited("Hops of responses of the nodes' metadata service: 2 lets containers use it."),
    ] = 1
    tags: Annotated[
        dict[str, str],
        limited(
            "More tags for everything that `up` creates, as an organization may require. Tags are not secret.",
            allowed="a table of KEY = 'value'",
        ),
    ] = {}
    ready_minutes: (
        Annotated[
            float,
            limited(
                "Minutes that a node may take to answer SSH before `up` gives up. Default: 10, with several GPUs 30, "
                "metal 40.",
                gt=0,
                le=120,
            ),
        ]
        | None
    ) = None

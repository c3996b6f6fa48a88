"""What the user asked for, as frozen records: ClusterSpec, JobSpec, SyncSpec and SetupSpec.

Each field has its limits and its help; schema.py tells them to others. settings.py merges the sources and validates the
values.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_NODES = 100  # AWS recommends at most 100 instances per RunInstances call


def _limited(description: str, *, allowed: str = "", **limits: Any) -> Meta:
    return Meta(description=description, extra={"allowed": allowed} if allowed else None, **limits)


Name = Annotated[
    str,
    _limited(
        "Name of the cluster: the value of its `cloudddp:cluster` tag.",
        allowed="1 to 40 of a-z, 0-9 and '-', starting with a letter or digit",
        pattern=r"^[a-z0-9][a-z0-9-]{0,39}\Z",
    ),
]
Relative = Annotated[
    str,
    _limited(
        "",
        allowed="a relative path inside the project, without '..'",
        pattern=r"^(?!/)(?!~)(?!(.*/)?\.\.(/|$)).+\Z",
    ),
]


Region = Annotated[
    str,
    _limited(
        "",
        allowed="an AWS region such as us-east-1",
        pattern=r"^[a-z]{2,5}(-[a-z]+)+-\d\Z",
    ),
]
Zone = Annotated[
    str,
    _limited(
        "",
        allowed="an availability zone such as us-east-1a",
        pattern=r"^[a-z]{2,5}(-[a-z]+)+-\d[a-z]\Z",
    ),
]
Subnet = Annotated[
    str,
    _limited(
        "",
        allowed="an id such as subnet-0abc, or a tag such as tag:Name=private",
        pattern=r"^(subnet-[0-9a-f]+|tag:[^=\0]{1,128}=[^\0]{0,256})\Z",
    ),
]


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """[cluster]: the nodes, where they run, and when they terminate."""

    name: Name = "default"
    nodes: Annotated[int, _limited("Number of nodes.", ge=1, le=MAX_NODES)] = 2
    instance_type: Annotated[
        str,
        _limited(
            "EC2 instance type of every node.",
            allowed="an EC2 instance type such as g5.xlarge",
            pattern=r"^[a-z][a-z0-9-]*\.[a-z0-9-]+\Z",
        ),
    ] = "g5.xlarge"
    max_hours: Annotated[
        float,
        _limited("Nodes terminate after this many hours. This cannot be switched off.", gt=0, le=336),
    ] = 8.0
    idle_minutes: Annotated[
        float,
        _limited(
            "A node that had no job and no SSH connection for so many minutes terminates by itself; 0 switches this off.",
            ge=0,
            le=20160,
        ),
    ] = 0.0
    max_cost: (
        Annotated[
            float,
            _limited(
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
            _limited(
                "USD per node and hour, for an instance type whose price cloudddp does not know.",
                gt=0,
                le=1e4,
            ),
        ]
        | None
    ) = None
    spot: Annotated[bool, _limited("Use spot instances (cheaper; AWS may interrupt them at any time).")] = (
        False
    )
    reservation: (
        Annotated[
            str,
            _limited(
                "Id of an on-demand capacity reservation or a capacity block to launch into.",
                allowed="an id such as cr-0123456789abcdef0",
                pattern=r"^cr-[0-9a-f]{8,17}\Z",
            ),
        ]
        | None
    ) = None
    placement_group: Annotated[
        bool,
        _limited("Place two nodes or more close together, in a placement group of strategy cluster."),
    ] = True
    efa: Annotated[
        bool,
        _limited("Use EFA between two nodes or more, on all network cards, if the instance type has it."),
    ] = True
    require_efa: Annotated[
        bool,
        _limited("Fail if EFA is missing: on the instance type, on a node, or when a rank starts NCCL."),
    ] = False
    allow_cpu: Annotated[bool, _limited("Accept nodes without a GPU, or with defective ones.")] = False
    region: (
        Annotated[
            str,
            _limited(
                "AWS region. Default: AWS_REGION, or that of the AWS profile.",
                allowed="an AWS region such as us-east-1",
                pattern=r"^[a-z]{2,5}(-[a-z]+)+-\d\Z",
            ),
        ]
        | None
    ) = None
    regions: Annotated[
        tuple[Region, ...],
        _limited(
            "Regions in which `up` looks for capacity, in this order. Other commands use the one where the cluster is.",
            max_length=20,
        ),
    ] = ()
    zones: Annotated[
        tuple[Zone, ...],
        _limited(
            "Availability zones in which `up` looks for capacity, in this order. All nodes are in one zone. "
            "Default: every zone that offers the type and has a subnet with enough free addresses.",
            max_length=50,
        ),
    ] = ()
    wait_capacity: Annotated[
        str,
        _limited(
            "How long `up` keeps trying if no zone has capacity, such as 30m or 2h. 0 does not wait. Nothing runs between two "
            "attempts; a launch that AWS accepts and then ends is billed, and counts against max_cost.",
            allowed="0, or a time such as 45s, 30m, 2h or 1d (at most 14d)",
            pattern=r"^(0|[1-9]\d{0,5}[smhd])\Z",
        ),
    ] = "0"
    vpc: (
        Annotated[
            str,
            _limited(
                "VPC: an id, or tag:KEY=VALUE. Default: that of the subnets, or the default VPC.",
                allowed="an id such as vpc-0abc, or a tag such as tag:Name=training",
                pattern=r"^(vpc-[0-9a-f]+|tag:[^=\0]{1,128}=[^\0]{0,256})\Z",
            ),
        ]
        | None
    ) = None
    subnets: Annotated[
        tuple[Subnet, ...],
        _limited(
            "Subnets of one VPC, by id or tag:KEY=VALUE, in the order in which `up` looks for capacity. "
            "Default: those of the VPC.",
            max_length=50,
        ),
    ] = ()
    image: Annotated[
        str,
        _limited(
            "AMI id, or an SSM parameter that holds one; {arch} becomes x86_64 or arm64.",
            allowed="an image id (ami-...) or the name of an SSM parameter (/...)",
            pattern=r"^(ami-[0-9a-f]+|/[A-Za-z0-9_.{}/-]+)\Z",
        ),
    ] = "/aws/service/deeplearning/ami/{arch}/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"
    user: (
        Annotated[
            str,
            _limited(
                "Login user. Default: that of the image's operating system.",
                allowed="a Unix user name",
                pattern=r"^[a-z_][a-z0-9_-]{0,31}\Z",
            ),
        ]
        | None
    ) = None
    ssh_port: Annotated[int, _limited("Port of the nodes' SSH server.", ge=1, le=65535)] = 22
    ssh_from: Annotated[
        tuple[
            Annotated[
                str,
                _limited(
                    "",
                    allowed="a CIDR block such as 203.0.113.7/32",
                    pattern=r"^[0-9a-fA-F:.]+/\d{1,3}\Z",
                ),
            ],
            ...,
        ],
        _limited("CIDR blocks that may connect with SSH. Default: this computer's address only."),
    ] = ()
    connect: (
        Annotated[
            Literal["public", "private", "jump"],
            _limited(
                "How SSH reaches the nodes: by public address, by private address (VPN), or by proxy_jump."
            ),
        ]
        | None
    ) = None
    proxy_jump: (
        Annotated[
            str,
            _limited(
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
            _limited(
                "Command that connects to a node's SSH server, as ssh's ProxyCommand: %h is the instance id, %a the address.",
                allowed="a command line of at most 2000 characters",
                pattern=r"^[^\x00-\x1f\x7f]{1,2000}\Z",
            ),
        ]
        | None
    ) = None
    disk_gb: Annotated[int, _limited("Size of the root volume in GiB (gp3, encrypted).", ge=8, le=16384)] = (
        150
    )
    disk_throughput: Annotated[
        int,
        _limited(
            "Throughput of the root volume in MiB/s: a new volume is read from its snapshot at first. Above 125, each MiB/s "
            "costs about $0.04 a month, above 750 about $0.06; the price includes it.",
            ge=125,
            le=2000,
        ),
    ] = 500
    kms_key: (
        Annotated[
            str,
            _limited(
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
            _limited(
                "Instance profile of the nodes, by name or ARN: jobs get the permissions of its role. Default: none.",
                allowed="the name or ARN of an instance profile",
                pattern=r"^(arn:aws[a-z-]*:iam::\d{12}:instance-profile/([\x21-\x7e]{1,510}/)?)?[A-Za-z0-9_+=,.@-]{1,128}\Z",
            ),
        ]
        | None
    ) = None
    imds_hop_limit: Annotated[
        Literal[1, 2],
        _limited("Hops of responses of the nodes' metadata service: 2 lets containers use it."),
    ] = 1
    tags: Annotated[
        dict[str, str],
        _limited(
            "More tags for everything that `up` creates, as an organization may require. Tags are not secret.",
            allowed="a table of KEY = 'value'",
        ),
    ] = {}
    ready_minutes: (
        Annotated[
            float,
            _limited(
                "Minutes that a node may take to answer SSH before `up` gives up. Default: 10, with several GPUs 30, "
                "metal 40.",
                gt=0,
                le=120,
            ),
        ]
        | None
    ) = None


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """[job]: how ranks are started."""

    nproc_per_node: Annotated[
        Literal["gpu"] | Annotated[int, Meta(ge=1, le=256)] | tuple[Annotated[int, Meta(ge=1, le=256)], ...],
        _limited(
            "Ranks per node: a number, a list with one number per node, or 'gpu': one per GPU (1 without GPUs).",
            allowed="a whole number from 1 to 256, a list of such numbers (one per node), or 'gpu'",
        ),
    ] = "gpu"
    rendezvous: Annotated[
        Literal["c10d", "static", "direct"],
        _limited(
            "How ranks find each other: torchrun's c10d or static, or direct (no torchrun; RANK etc. are set)."
        ),
    ] = "c10d"
    positional_ranks: Annotated[
        bool, _limited("With rendezvous direct: append RANK and LOCAL_RANK to the script's arguments.")
    ] = False
    master_port: Annotated[
        int, _limited("Port of the rendezvous on node 0; 0 chooses a free one.", ge=0, le=65535)
    ] = 0
    max_restarts: Annotated[
        int,
        _limited(
            "Passed to torchrun as --max-restarts. Across nodes torchrun does not recover reliably; leave it at 0.",
            ge=0,
            le=100,
        ),
    ] = 0
    python: Annotated[
        str,
        _limited("Python on the nodes. If empty: /opt/pytorch/bin/python where it exists, else python3."),
    ] = ""
    stop_grace: Annotated[
        float, _limited("Seconds between SIGTERM and SIGKILL when ranks are stopped.", ge=0, le=600)
    ] = 10.0
    save_minutes: Annotated[
        float,
        _limited(
            "Minutes before the cluster's deadline, and before a scheduled maintenance of a node, at which the ranks are told to "
            "save and end (SIGTERM).",
            ge=0,
            le=15,
        ),
    ] = 3.0
    retries: Annotated[
        int,
        _limited(
            "How often within an hour a job that has failed is started again, on all nodes. Errors of the script itself are "
            "not repeated.",
            ge=0,
            le=100,
        ),
    ] = 0
    nodes_min: (
        Annotated[
            int,
            _limited(
                "If a lost node cannot be replaced, resume the job with the nodes that are left if they are at least this many. "
                "Default: all.",
                ge=1,
                le=1024,
            ),
        ]
        | None
    ) = None
    preflight: Annotated[
        bool,
        _limited(
            "Check, before ranks start, that all nodes have the same GPUs, driver, Python, torch, CUDA and NCCL, space on "
            "their disks and clocks within 2 s."
        ),
    ] = True
    heartbeat: Annotated[
        float,
        _limited(
            "Seconds after which a node that sends nothing to the others is lost, and the job ends on all of them.",
            ge=2,
            le=600,
        ),
    ] = 15.0
    stall_minutes: Annotated[
        float,
        _limited(
            "Minutes without output, training status, CPU or GPU activity of any rank after which a job has stalled. 0 "
            "watches nothing.",
            ge=0,
            le=10_000,
        ),
    ] = 10.0
    on_stall: Annotated[
        Literal["kill", "restart", "leave", "down"],
        _limited(
            "What happens to a stalled job, after its stacks were read: kill it, restart it (counts as one of `retries`), "
            "leave it, or kill it and shut the nodes down, which ends the cluster."
        ),
    ] = "kill"
    log_mb: Annotated[
        int,
        _limited(
            "MiB of each rank's log that its node keeps: the beginning and the end. The middle of a longer log is dropped.",
            ge=1,
            le=1 << 20,
        ),
    ] = 1024
    outputs: Annotated[
        tuple[Relative, ...],
        _limited(
            "Folders or files in the project that the script writes on the nodes; `pull` and `run` copy them back."
        ),
    ] = ("runs",)
    snapshots: Annotated[
        tuple[Relative, ...],
        _limited(
            "Patterns of the script's snapshots in the project, such as 'runs/**/*.pt': `resume` copies the newest file to the nodes "
            "that lack it. Not needed where ranks send it to each other, as train/ does."
        ),
    ] = ()
    scratch: Annotated[
        tuple[Relative, ...],
        _limited(
            "Folders or files that the script writes there and that are not results (a downloaded data set): "
            "`run` terminates nodes that hold them."
        ),
    ] = ()
    env: Annotated[dict[str, str], _limited("Environment variables of every rank.")] = {}


class SyncSpec(msgspec.Struct, frozen=True, kw_only=True):
    """[sync]: which files are sent to the nodes."""

    exclude: Annotated[
        tuple[str, ...], _limited("More patterns to exclude, in the syntax of .gitignore.")
    ] = ()
    max_mb: Annotated[
        float,
        _limited("Refuse to send more than this many MiB (a data set or a .venv, by mistake).", gt=0, le=1e7),
    ] = 512.0


class SetupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """[setup]: commands run on every node in the project's folder, once per content."""

    run: Annotated[
        tuple[str, ...], _limited("Shell commands, run in order; the first that fails stops the launch.")
    ] = ()
    inputs: Annotated[
        tuple[Relative, ...],
        _limited("Files that rerun the commands when they change, e.g. requirements.txt."),
    ] = ()


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings."""

    cluster: ClusterSpec = ClusterSpec()
    job: JobSpec = JobSpec()
    sync: SyncSpec = SyncSpec()
    setup: SetupSpec = SetupSpec()

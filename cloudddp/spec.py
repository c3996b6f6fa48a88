"""What the user asked for: ClusterSpec, JobSpec, SyncSpec and SetupSpec, frozen.

One table of fields, with their limits and their help, serves the file, the environment, the flags, the error
messages and the generated reference. Where values come from, and their checking, is settings.py's business.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

MAX_NODES = 100  # Amazon advises at most 100 instances in one RunInstances


def _limited(description: str, *, allowed: str = "", **limits: Any) -> Meta:
    return Meta(description=description, extra={"allowed": allowed} if allowed else None, **limits)


Name = Annotated[
    str,
    _limited(
        "Name of the cluster: the value of its `cloudddp:cluster` tag.",
        allowed="1 to 40 of a-z, 0-9 and '-', beginning with a letter or digit",
        pattern=r"^[a-z0-9][a-z0-9-]{0,39}\Z",
    ),
]
Relative = Annotated[
    str,
    _limited(
        "",
        allowed="a path inside the project, relative, without '..'",
        pattern=r"^(?!/)(?!~)(?!(.*/)?\.\.(/|$)).+\Z",
    ),
]


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """[cluster]: the machines, where they are, and when they end."""

    name: Name = "default"
    nodes: Annotated[int, _limited("How many nodes.", ge=1, le=MAX_NODES)] = 2
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
        _limited("The nodes end themselves after this many hours. It cannot be switched off.", gt=0, le=336),
    ] = 8.0
    max_cost: (
        Annotated[
            float,
            _limited(
                "Most that the cluster may cost, in USD: becomes an earlier deadline, from the price.",
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
                "USD per node and hour, where cloudddp does not know the price of the type.", gt=0, le=1e4
            ),
        ]
        | None
    ) = None
    spot: Annotated[bool, _limited("Ask for spot capacity (cheaper; AWS may end it at any time).")] = False
    allow_cpu: Annotated[bool, _limited("Accept an instance type without a GPU.")] = False
    region: (
        Annotated[
            str,
            _limited(
                "AWS region. Left out: AWS_REGION, or that of the AWS profile.",
                allowed="an AWS region such as us-east-1",
                pattern=r"^[a-z]{2}(-[a-z]+)+-\d\Z",
            ),
        ]
        | None
    ) = None
    zone: (
        Annotated[
            str,
            _limited(
                "Availability zone. Left out: the first zone that offers the type and has addresses free.",
                allowed="an availability zone such as us-east-1a",
                pattern=r"^[a-z]{2}(-[a-z]+)+-\d[a-z]\Z",
            ),
        ]
        | None
    ) = None
    subnet: (
        Annotated[
            str,
            _limited(
                "Subnet id. Left out: a subnet of the VPC in the zone.",
                allowed="an id such as subnet-0abc",
                pattern=r"^subnet-[0-9a-f]+\Z",
            ),
        ]
        | None
    ) = None
    vpc: (
        Annotated[
            str,
            _limited(
                "VPC id. Left out: the default VPC.",
                allowed="an id such as vpc-0abc",
                pattern=r"^vpc-[0-9a-f]+\Z",
            ),
        ]
        | None
    ) = None
    image: Annotated[
        str,
        _limited(
            "Machine image: an id, or an SSM parameter that holds one; {arch} becomes x86_64 or arm64.",
            allowed="an image id (ami-...) or the name of an SSM parameter (/...)",
            pattern=r"^(ami-[0-9a-f]+|/[A-Za-z0-9_.{}/-]+)\Z",
        ),
    ] = "/aws/service/deeplearning/ami/{arch}/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"
    user: Annotated[
        str,
        _limited(
            "Login user of the image.", allowed="a Unix user name", pattern=r"^[a-z_][a-z0-9_-]{0,31}\Z"
        ),
    ] = "ubuntu"
    ssh_port: Annotated[int, _limited("Port of the nodes' SSH server.", ge=1, le=65535)] = 22
    ssh_from: Annotated[
        tuple[
            Annotated[
                str,
                _limited(
                    "",
                    allowed="an address block such as 203.0.113.7/32",
                    pattern=r"^[0-9a-fA-F:.]+/\d{1,3}\Z",
                ),
            ],
            ...,
        ],
        _limited("Address blocks that may use SSH. Left out: this computer's own address alone."),
    ] = ()
    disk_gb: Annotated[int, _limited("Size of the root volume, GiB (gp3, encrypted).", ge=8, le=16384)] = 150
    ready_minutes: Annotated[
        float, _limited("How long a node may take until it answers SSH before `up` gives up.", gt=0, le=120)
    ] = 10.0


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """[job]: how ranks are started."""

    nproc_per_node: Annotated[
        Literal["gpu"] | Annotated[int, Meta(ge=1, le=256)] | tuple[Annotated[int, Meta(ge=1, le=256)], ...],
        _limited(
            "Ranks on each node: a number, a list with one number a node, or 'gpu' for one a GPU (1 without).",
            allowed="a whole number from 1 to 256, a list of such numbers (one a node), or 'gpu'",
        ),
    ] = "gpu"
    rendezvous: Annotated[
        Literal["c10d", "static", "direct"],
        _limited(
            "How ranks find each other: torchrun's c10d or static, or 'direct' (no torchrun; RANK and so on are set)."
        ),
    ] = "c10d"
    positional_ranks: Annotated[
        bool, _limited("With 'direct': append RANK and LOCAL_RANK to the script's arguments.")
    ] = False
    master_port: Annotated[
        int, _limited("Port of the rendezvous on node 0; 0 takes one that is free.", ge=0, le=65535)
    ] = 0
    max_restarts: Annotated[
        int,
        _limited("Passed to torchrun. Across nodes it was seen not to recover; leave 0.", ge=0, le=100),
    ] = 0
    python: Annotated[
        str,
        _limited("Python on the nodes. Left empty: /opt/pytorch/bin/python where it exists, else python3."),
    ] = ""
    stop_grace: Annotated[
        float, _limited("Seconds between SIGTERM and SIGKILL when ranks are stopped.", ge=0, le=600)
    ] = 10.0
    outputs: Annotated[
        tuple[Relative, ...],
        _limited(
            "Folders or files that the script writes in the project on the nodes, and that `pull` and `run` bring back."
        ),
    ] = ("runs",)
    scratch: Annotated[
        tuple[Relative, ...],
        _limited(
            "Folders or files that the script writes there and nobody needs back (a data set that it downloads): "
            "`run` ends nodes that hold them."
        ),
    ] = ()
    env: Annotated[dict[str, str], _limited("Environment variables of every rank.")] = {}


class SyncSpec(msgspec.Struct, frozen=True, kw_only=True):
    """[sync]: which files go to the nodes."""

    exclude: Annotated[
        tuple[str, ...], _limited("More patterns to leave out, in the syntax of .gitignore.")
    ] = ()
    max_mb: Annotated[
        float,
        _limited("Refuse to send more than this many MiB (a data set or a .venv by mistake).", gt=0, le=1e7),
    ] = 512.0


class SetupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """[setup]: commands run on every node in the project's folder, once per content."""

    run: Annotated[
        tuple[str, ...], _limited("Shell commands, in order; the first that fails stops the launch.")
    ] = ()
    inputs: Annotated[
        tuple[Relative, ...],
        _limited("Files whose change runs the commands again, e.g. requirements.txt."),
    ] = ()


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that cloudddp.toml may say, and the global options."""

    cluster: ClusterSpec = ClusterSpec()
    job: JobSpec = JobSpec()
    sync: SyncSpec = SyncSpec()
    setup: SetupSpec = SetupSpec()


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "cluster": ClusterSpec,
    "job": JobSpec,
    "sync": SyncSpec,
    "setup": SetupSpec,
}


def fields(section: str) -> dict[str, Any]:
    """Return {key: annotated type} of a section, in the order of the reference."""
    return get_type_hints(SECTIONS[section], include_extras=True)


def help_of(section: str, key: str) -> str:
    """Return the one-sentence description of a setting."""
    return next((m.description for m in unwrap(fields(section)[key])[1] if m.description), "")


def unwrap(hint: Any) -> tuple[Any, list[Meta]]:
    """Return (the bare type without None, its limits)."""
    inner, metas = hint, []
    while True:
        metas += [m for m in getattr(inner, "__metadata__", ()) if isinstance(m, Meta)]
        rest = [k for k in get_args(inner) if k is not type(None)]
        if hasattr(inner, "__metadata__") or (type(None) in get_args(inner) and len(rest) == 1):
            inner = rest[0] if not hasattr(inner, "__metadata__") else inner.__origin__
        else:
            return inner, metas


def allowed(hint: Any) -> str:
    """Return in words which values a field takes."""
    inner, metas = unwrap(hint)
    for meta in metas:
        if meta.extra and "allowed" in meta.extra:
            return str(meta.extra["allowed"])
    limits = next((m for m in metas if m.ge is not None or m.gt is not None), None)
    if get_origin(inner) is Literal:
        return "one of " + ", ".join(map(str, get_args(inner)))
    if get_origin(inner) is tuple:
        return f"a list in brackets, each {allowed(get_args(inner)[0])}"
    if get_origin(inner) is dict:
        return "a table of NAME = 'value'"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    return words[inner] + (_bounds(limits) if limits else "")


def _bounds(meta: Meta) -> str:
    if meta.gt is not None:
        return f" above {number(meta.gt)}" + (
            f" and at most {number(meta.le)}" if meta.le is not None else ""
        )
    return f" from {number(meta.ge or 0)}" + (f" to {number(meta.le)}" if meta.le is not None else " up")


def number(value: float) -> str:
    """Return a number as a person writes it: 10000000, not 1e+07."""
    return str(int(value)) if value == int(value) else repr(float(value))


def nearest(word: str, known: Sequence[str]) -> str:
    """Return "did you mean 'x'?" for the nearest known names, or the list of all where none is near."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.7)
    if not close:
        return "known: " + ", ".join(sorted(known))
    return "did you mean " + " or ".join(repr(name) for name in close) + "?"

"""What the user asked for, as frozen records: ClusterSpec (in cluster_spec.py), JobSpec, SyncSpec, SetupSpec
and others, and what their settings mean together. Pure.

Each field has its type and its limits; its help is in descriptions.py, that of a section its docstring.
settings.py merges the sources and validates the values.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.config.values import NOTIFY, NOTIFY_PATTERN, S3, Relative, limited, why_not
from cloudddp.errors import UsageError

Extra = Annotated[str, limited(allowed="the name of an extra", pattern=r"^[A-Za-z0-9][\w.-]*\Z")]
Image = Annotated[
    str, limited(allowed="an image such as pytorch/pytorch", pattern=r"^[A-Za-z0-9][\w./:@-]{0,254}\Z")
]


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
                pattern=rf"^{S3}\Z",
            ),
        ]
        | None
    ) = None
    notify: Annotated[str, limited(allowed=NOTIFY, pattern=rf"^({NOTIFY_PATTERN})\Z")] | None = None
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
        if not re.fullmatch(NOTIFY_PATTERN, value := self.env[name]):
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
            pattern=rf"^({S3}|(?!s3:)[^\x00-\x1f\x7f]{{1,1000}})\Z",
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

    cluster: ClusterSpec = field(default_factory=ClusterSpec)
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

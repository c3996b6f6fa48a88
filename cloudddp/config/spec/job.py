"""[job], [sync] and [setup]: how ranks are started, which files are sent, and what prepares the nodes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cloudddp.config.spec.limits import Relative, limited


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
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
                pattern=r"^s3://(?!xn--)(?!\d+\.\d+\.\d+\.\d+(/|\Z))(?!.{0,63}\.\.)"
                r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/(?!/)(?!(.*/)?\.{1,2}(/|\Z))(?!.*//)[A-Za-z0-9!_.*'()=+@/-]{0,440})?\Z",
            ),
        ]
        | None
    ) = None
    env: dict[str, str] = {}

    @property
    def not_sent(self) -> tuple[str, ...]:
        """Paths of the project that belong to the nodes: a sync leaves them alone."""
        return self.outputs or ("runs",)


class SyncSpec(msgspec.Struct, frozen=True, kw_only=True):
    """[sync]: which files are sent to the nodes."""

    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    max_mb: Annotated[float, limited(gt=0, le=1e7)] = 512.0


class SetupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """[setup]: commands run on every node in the project's folder, once per content."""

    run: tuple[str, ...] = ()
    inputs: tuple[Relative, ...] = ()

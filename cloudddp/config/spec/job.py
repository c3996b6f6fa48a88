"""[job], [sync] and [setup]: how ranks are started, which files are sent to the nodes, and what prepares them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cloudddp.config.spec.limits import Relative, limited


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """[job]: how ranks are started."""

    nproc_per_node: Annotated[
        Literal["gpu"] | Annotated[int, Meta(ge=1, le=256)] | tuple[Annotated[int, Meta(ge=1, le=256)], ...],
        limited(
            "Ranks per node: a number, a list with one number per node, or 'gpu': one per GPU (1 without GPUs).",
            allowed="a whole number from 1 to 256, a list of such numbers (one per node), or 'gpu'",
        ),
    ] = "gpu"
    rendezvous: Annotated[
        Literal["c10d", "static", "direct"],
        limited(
            "How ranks find each other: torchrun's c10d or static, or direct (no torchrun; RANK etc. are set)."
        ),
    ] = "c10d"
    positional_ranks: Annotated[
        bool, limited("With rendezvous direct: append RANK and LOCAL_RANK to the script's arguments.")
    ] = False
    master_port: Annotated[
        int, limited("Port of the rendezvous on node 0; 0 chooses a free one.", ge=0, le=65535)
    ] = 0
    max_restarts: Annotated[
        int,
        limited(
            "Passed to torchrun as --max-restarts. Across nodes torchrun does not recover reliably; leave it at 0.",
            ge=0,
            le=100,
        ),
    ] = 0
    torchrun_args: Annotated[
        tuple[str, ...],
        limited(
            'More options of torchrun, such as ["--numa-binding=node"]. Not those that cloudddp sets itself.'
        ),
    ] = ()
    python: Annotated[
        str,
        limited("Python on the nodes. If empty: /opt/pytorch/bin/python where it exists, else python3."),
    ] = ""
    stop_grace: Annotated[
        float, limited("Seconds between SIGTERM and SIGKILL when ranks are stopped.", ge=0, le=600)
    ] = 10.0
    save_minutes: Annotated[
        float,
        limited(
            "Minutes before the cluster's deadline, and before a scheduled maintenance of a node, at which ranks get SIGTERM, to "
            "save a snapshot and exit.",
            ge=0,
            le=15,
        ),
    ] = 3.0
    retries: Annotated[
        int,
        limited(
            "How often within an hour a job that has failed is started again, on all nodes. Errors of the script itself are "
            "not repeated.",
            ge=0,
            le=100,
        ),
    ] = 0
    nodes_min: (
        Annotated[
            int,
            limited(
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
        limited(
            "Check, before ranks start, that all nodes have the same GPUs, driver, Python, torch, CUDA and NCCL, space on "
            "their disks and clocks within 2 s."
        ),
    ] = True
    heartbeat: Annotated[
        float,
        limited(
            "Seconds after which a node that sends nothing to the others is lost, and the job ends on all of them.",
            ge=2,
            le=600,
        ),
    ] = 15.0
    stall_minutes: Annotated[
        float,
        limited(
            "Minutes without output, training status, CPU or GPU activity of any rank after which a job has stalled. 0 "
            "watches nothing.",
            ge=0,
            le=10_000,
        ),
    ] = 10.0
    on_stall: Annotated[
        Literal["kill", "restart", "leave", "down"],
        limited(
            "What happens to a stalled job, after its stacks were read: kill it, restart it (counts as one of `retries`), "
            "leave it, or kill it and shut the nodes down after `launch --keep` (30 minutes), which ends the cluster."
        ),
    ] = "kill"
    log_mb: Annotated[
        int,
        limited(
            "MiB of each rank's log that its node keeps: the beginning and the end. The middle of a longer log is dropped.",
            ge=1,
            le=1 << 20,
        ),
    ] = 1024
    outputs: Annotated[
        tuple[Relative, ...],
        limited(
            "Folders or files in the project that the script writes on the nodes; `pull` and `run` copy them back. Default: "
            "every file that jobs wrote in the project, up to `pull_mb`."
        ),
    ] = ()
    pull_mb: Annotated[
        float,
        limited(
            "Without `outputs`: how many MiB of a node's new files `pull` and `run` copy. Of more, they copy small files and the "
            "newest checkpoints, and name the others.",
            gt=0,
            le=1e7,
        ),
    ] = 2048.0
    snapshots: Annotated[
        tuple[Relative, ...],
        limited(
            "Patterns of the script's snapshots in the project, such as 'runs/**/*.pt'. Before ranks start, only the newest "
            "file of all is copied to the nodes that lack it; a node that AWS is about to end sends its newest one to a node "
            "that stays. Not needed where every node holds a snapshot, as with `--snapshot-per-node` of train/. `share` takes "
            "its place where both are set."
        ),
    ] = ()
    share: Annotated[
        tuple[Relative, ...],
        limited(
            "Files and folders that the script writes in the project on some nodes and reads on all, such as 'snapshot.pt' or "
            "'out'; patterns as for `snapshots`. Before ranks start, the newest version of each file is copied to the nodes "
            "that lack it."
        ),
    ] = ()
    share_mb: Annotated[
        float,
        limited(
            "Without `share` and `snapshots`: before ranks start, files that jobs wrote (in `outputs`, or anywhere in the project) "
            "are copied to the nodes that have no file of that name, up to this many MiB from each node. 0 copies nothing.",
            ge=0,
            le=1e7,
        ),
    ] = 2048.0
    scratch: Annotated[
        tuple[Relative, ...],
        limited(
            "Folders or files that the script writes there and that are not results (a downloaded data set): "
            "`run` terminates nodes that hold them."
        ),
    ] = ()
    results_s3: (
        Annotated[
            str,
            limited(
                "Where the nodes copy outputs and logs when a job has ended, with the role of cluster.instance_profile: an S3 bucket "
                "and a prefix. `pull` reads them there once the cluster has gone. Default: nowhere.",
                allowed="s3://BUCKET or s3://BUCKET/PREFIX, of at most 512 letters, digits and !-_.*'()=+@/",
                pattern=r"^s3://(?!xn--)(?!\d+\.\d+\.\d+\.\d+(/|\Z))(?!.{0,63}\.\.)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/(?!/)(?!(.*/)?\.{1,2}(/|\Z))"
                r"(?!.*//)[A-Za-z0-9!_.*'()=+@/-]{0,440})?\Z",
            ),
        ]
        | None
    ) = None
    env: Annotated[dict[str, str], limited("Environment variables of every rank.")] = {}

    @property
    def not_sent(self) -> tuple[str, ...]:
        """Paths of the project that belong to the nodes: a sync leaves them alone."""
        return self.outputs or ("runs",)


class SyncSpec(msgspec.Struct, frozen=True, kw_only=True):
    """[sync]: which files are sent to the nodes."""

    exclude: Annotated[
        tuple[str, ...], limited("More patterns to exclude, in the syntax of .gitignore.")
    ] = ()
    include: Annotated[
        tuple[str, ...],
        limited(
            "Files to send although .gitignore names them, such as 'data/', in the syntax of .gitignore; the exact path of a file "
            "also sends one that is withheld for its name."
        ),
    ] = ()
    max_mb: Annotated[
        float,
        limited(
            "Refuse to send more than this many MiB to a node (a data set or a .venv, by mistake).",
            gt=0,
            le=1e7,
        ),
    ] = 512.0


class SetupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """[setup]: commands run on every node in the project's folder, once per content."""

    run: Annotated[
        tuple[str, ...], limited("Shell commands, run in order; the first that fails stops the launch.")
    ] = ()
    inputs: Annotated[
        tuple[Relative, ...],
        limited("Files that rerun the commands when they change, e.g. requirements.txt."),
    ] = ()

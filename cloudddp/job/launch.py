"""Launching a job: check, sync, set up, start the ranks on every node, in a few steps of the agent: probe
(which ships the agent and compares files), poweroff with --down, receive and setup where something has
changed, start."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.machine import ProbeRequest
from cloudddp.cluster.connect import PROJECT, probe
from cloudddp.cluster.model import Cluster
from cloudddp.config import package_inputs
from cloudddp.config.spec import Config, SetupSpec
from cloudddp.errors import CloudDDPError, Message, NodeError, StepWarning, UsageError, q
from cloudddp.formats import plural
from cloudddp.job import project_files, ranks, start_ranks, sync, unsent
from cloudddp.job.job_request import NewJob, Script, find_script, localhost_line
from cloudddp.job.poweroff import note_started, plan_before_start
from cloudddp.job.project_files import ProjectFiles
from cloudddp.job.py_spy import PySpyTransfer
from cloudddp.job.ranks import LaunchNode, NodePlan
from cloudddp.job.setup import OnSetupLine, Sources, abort, container_of, set_up, shared_folders
from cloudddp.job.sync import UNKNOWN, Progress, ProjectIdentity, launch_nodes

CLOCK_SKEW = 5.0  # seconds; more makes it uncertain which rank failed first, and breaks certificates


def prepare(
    root: Path,
    here: Path,
    script: Script,
    config: Config,
    *,
    fresh: bool = False,
    secret_files: Iterable[Path] = (),
    warn: Callable[[str], None] = lambda _: None,
) -> Script:
    """Check everything that can be checked before a node exists; return the script by its path in the
    project. `here`: the user's current folder. `fresh`: the nodes will be new, so every file will be sent.
    `warn` gets what is not sent. Raises UsageError."""
    command = config.job.notify_target.partition(" ")[0]
    files = project_files.of_config(root, config, secret_files=secret_files)
    if command.startswith("./") and str(PurePosixPath(command)) not in files.manifest:
        raise UsageError(f"job.notify runs {command}, which is not among the files that are sent")
    _check_inputs(root, config.setup, files.manifest)
    found, file = find_script(root, here, script, files.manifest, config.job.env)
    unsent.require_sent(files, config, file)
    if fresh:
        sync.check_size(files, files.manifest, config.sync.max_mb)
        # A list has to fit the nodes; GPUs are not known yet.
        ranks.nproc(config.job, [0] * config.cluster.nodes)
    for note in unsent.notes(files, config, "" if found.program else file, script.args):
        warn(note)
    if config.cluster.nodes > 1 and not found.program and (line := localhost_line(root / file)):
        warn(
            f"{file}, line {line}: sets the rendezvous address to localhost, so each node would train alone. "
            "Remove it: torchrun starts the ranks and sets MASTER_ADDR, RANK and WORLD_SIZE"
        )
    return found


def _check_inputs(root: Path, setup: SetupSpec, sent: Collection[str]) -> None:
    """Raise UsageError for a setup input that is not sent: its changes would not run the setup again."""
    listed = package_inputs.needed(setup)
    for key, name in (*(("environment", one) for one in listed), *(("inputs", one) for one in setup.inputs)):
        if name in sent:
            continue
        if not (root / name).is_file():
            raise UsageError(f"setup.{key} names {name}, which is not in {root}")
        hint = (
            f"write it as `{PurePosixPath(name)}`, and check that neither .gitignore nor sync.exclude "
            "names it"
        )
        raise UsageError(f"setup.{key} names {name}, which is not among the files that are sent", hint=hint)


def launch(
    runner: Runner,
    cluster: Cluster,
    config: Config,
    job: NewJob,
    files: ProjectFiles,
    *,
    progress: Progress,
    origin: ProjectIdentity = UNKNOWN,
    on_setup_line: OnSetupLine = lambda _node, _line: None,
    sources: Sources = MappingProxyType({}),
) -> PySpyTransfer:
    """Sync, set up and start the script's ranks on every node; return when all have been started. `sources`
    are the file systems of [[shared]]. What is returned is still being sent, by a thread: the ranks do not
    need it. `on_setup_line` gets each line of the setup commands, one at a time, and must not block.

    Raises UsageError, NodeError. If a node cannot start, what the others have started is stopped again; after
    an interrupt that is up to the caller, with `cancel.abort_launch`.
    """
    ranks.nproc(config.job, [0] * len(cluster.nodes))
    # Before the files of a job that still runs are changed.
    nodes = checked_nodes(runner, cluster, config, progress, manifest=files.digest)
    origin.check(nodes)
    plan_before_start(runner, cluster, job)
    ranks.nproc(config.job, [node.probe.gpus for node in nodes])
    sync.update(runner, nodes, files, progress, origin, max_mb=config.sync.max_mb, job=job.id)
    shared = shared_folders(config.shared, {node.rank: node.address for node in nodes}, sources)
    for node in nodes:
        node.shared, node.container = shared[node.rank], container_of(config.job, gpus=node.probe.gpus)
    set_up(runner, nodes, config, job, files, progress, on_setup_line)
    planned = plans(cluster, nodes, config, job)
    total = sum(plan.ranks for plan in planned)
    progress(f"starting job {job.id}: {plural(total, 'rank')} on {plural(len(planned), 'node')}")
    try:
        start_ranks.start(runner, cluster, config, nodes, planned, job, files.manifest)
    except Exception:  # some nodes may have started
        abort(runner, job.id, progress)
        raise
    note_started(cluster, job)
    return PySpyTransfer(runner, nodes if config.job.stall_minutes else (), progress)


def plans(cluster: Cluster, nodes: Sequence[LaunchNode], config: Config, job: NewJob) -> list[NodePlan]:
    efa = config.cluster.require_efa or cluster.require_efa
    return ranks.plan(config.job, nodes, job.script, job_id=job.id, cluster=cluster.name, require_efa=efa)


_EFA_OF_CLUSTER = Message(
    "the cluster was created with --require-efa: `cloudddp down` and `cloudddp up` replace its machines; "
    "`cloudddp exec -- 'fi_info -p efa'` shows the reason"
)
_EFA_OF_SETTINGS = Message(
    "create the cluster with `cloudddp up --require-efa`, or set require_efa = false in cloudddp.toml"
)


def checked_nodes(
    runner: Runner, cluster: Cluster, config: Config, progress: Progress, *, manifest: str = ""
) -> list[LaunchNode]:
    """Probe the nodes, and return them by rank. Raises CloudDDPError where a job runs, NodeError for a node
    that lacks EFA, GPUs or Python; reports clocks that differ. `manifest`: the
    digest of the files to be sent."""
    require_efa = config.cluster.require_efa or cluster.require_efa
    python = "" if config.job.container else config.job.python
    probes = probe(runner, cluster, ProbeRequest(PROJECT, "", python, manifest, efa=int(require_efa)))
    now = datetime.now(UTC).timestamp()
    for node, reply in probes.items():
        for job in reply.running:
            raise CloudDDPError(
                f"job {job} is still running on node {node}",
                hint=f"`cloudddp logs -f {q(job)}` follows it, `cloudddp cancel {q(job)}` stops it",
            )
        if require_efa and not reply.efa:
            raise NodeError(
                f"node {node} shows no EFA device (fi_info -p efa)",
                hint=_EFA_OF_CLUSTER if cluster.require_efa else _EFA_OF_SETTINGS,
            )
        # One rank on the CPU would start instead.
        if reply.gpus < cluster.gpus and not config.cluster.allow_cpu:
            raise NodeError(
                f"node {node} ({cluster.nodes[node].id}) shows {reply.gpus} of {cluster.gpus} GPUs "
                "(nvidia-smi -L)",
                hint="`cloudddp exec -- nvidia-smi` shows the reason; `cloudddp down` and `cloudddp up` "
                "replace the machine; allow_cpu = true in [cluster] uses what it has",
            )
        if not reply.python and not (config.job.python and config.setup.run):  # setup may install it
            what = f"no {config.job.python}" if config.job.python else "no Python found"
            raise NodeError(f"node {node}: {what}", hint="set job.python to its path on the nodes")
        if abs(reply.time - now) > CLOCK_SKEW:
            progress(
                StepWarning(
                    f"the clock of node {node} differs from this computer's by {reply.time - now:+.0f} s"
                )
            )
    counts = {reply.gpus for reply in probes.values()}
    if len(counts) > 1:
        progress(StepWarning(f"the nodes report different numbers of GPUs: {sorted(counts)}"))
    return launch_nodes(cluster, probes)

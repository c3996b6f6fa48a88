"""Launching a job: check, sync, set up, start the ranks on every node.

At most three batched steps per node before ranks run: probe (which ships the agent and compares files),
receive and setup where something has changed, start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.frames import FollowRequest
from cloudddp.agent.protocol.machine import ProbeReply
from cloudddp.agent.protocol.start import (
    Container,
    DataCopy,
    SetupReply,
    SetupRequest,
    SharedFolder,
    StartRequest,
)
from cloudddp.cluster.connect import PROJECT, probe
from cloudddp.cluster.model import Cluster
from cloudddp.config import package_inputs, packages
from cloudddp.config.package_inputs import PackageInputs
from cloudddp.config.spec import Config, SetupSpec
from cloudddp.errors import CloudDDPError, Interrupted, Message, NodeError, UsageError, q
from cloudddp.formats import counted
from cloudddp.job import containers, install_failure, project_files, ranks, shared_folders, sync, unsent
from cloudddp.job import start_ranks as starting
from cloudddp.job.cancel import abort_launch
from cloudddp.job.follow.lines import LineSplitter
from cloudddp.job.job_request import NewJob, Script, find_script, localhost_line
from cloudddp.job.poweroff import note_started, plan_before_start
from cloudddp.job.project_files import Snapshot
from cloudddp.job.py_spy import Sending
from cloudddp.job.ranks import Host, NodePlan
from cloudddp.job.shared_folders import Sources
from cloudddp.job.sync import UNKNOWN, Origin, Progress
from cloudddp.text import one_line

OnSetupLine = Callable[[int, str], None]  # node, line

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
    project.

    `here` is the user's current folder. `fresh`: the nodes will be new, so every file will be sent. `warn`
    gets what is not sent. Raises UsageError; calls nothing.
    """
    told = config.job.notify_target.partition(" ")[0]
    files = project_files.of_config(root, config, secret_files=secret_files)
    if told.startswith("./") and str(PurePosixPath(told)) not in files.manifest:
        raise UsageError(f"job.notify runs {told}, which is not among the files that are sent")
    _check_inputs(root, config.setup, files.manifest)
    found, file = find_script(root, here, script, files.manifest, config.job.env)
    unsent.require_sent(files, config, file)
    if fresh:
        sync.check_size(files, files.manifest, config.sync.max_mb)
        ranks.nproc(
            config.job, [0] * config.cluster.nodes
        )  # a list has to fit the nodes; GPUs are not known yet
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
    *,
    root: Path,
    progress: Progress,
    secret_files: Iterable[Path] = (),
    origin: Origin = UNKNOWN,
    on_setup_line: OnSetupLine = lambda _node, _line: None,
    sources: Sources = MappingProxyType({}),
) -> Sending:
    """Sync, set up and start the script's ranks on every node; return when all have been started.
    `secret_files` are not sent, `sources` are the file systems of [[shared]].

    What is returned is still being sent, by a thread: the ranks do not need it.

    `on_setup_line` gets each line of the setup commands; one thread calls it for all nodes, so it must not
    block.

    Raises UsageError, NodeError. If a node cannot start, what the others have started is stopped again; after
    an interrupt that is up to the caller, with `cancel.abort_launch`.
    """
    ranks.nproc(config.job, [0] * len(cluster.nodes))
    require_efa = config.cluster.require_efa or cluster.require_efa
    files = project_files.of_config(root, config, secret_files=secret_files)
    probes = probe(
        runner,
        cluster,
        manifest=files.digest,
        python="" if config.job.container else config.job.python,
        efa=int(require_efa),
        then=(StartRequest.STEP, FollowRequest.STEP),
    )
    check_nodes(cluster, probes, config, progress)  # before the files of a job that still runs are changed
    origin.check(probes)
    plan_before_start(runner, cluster, job)
    ranks.nproc(config.job, [probes[node].gpus for node in sorted(probes)])
    versions = sync.update(runner, cluster, probes, config, files, progress, origin, job=job.id)
    addresses = {node: cluster.nodes[node].private_ip for node in probes}
    shared = shared_folders.of_nodes(config.shared, addresses, sources)
    images = _set_up(runner, probes, config, job, shared, files, progress, on_setup_line)
    planned = plans(cluster, probes, config, job, require_efa=require_efa)
    total = sum(plan.ranks for plan in planned)
    progress(f"starting job {job.id}: {counted(total, 'rank')} on {counted(len(planned), 'node')}")
    try:
        started = starting.start(
            runner, cluster, probes, config, planned, job, files.manifest, versions, images
        )
    except Exception:  # some nodes may have started
        _abort(runner, job.id, progress)
        raise
    note_started(cluster, job)
    return Sending(runner, cluster, started if config.job.stall_minutes else {}, progress)


_EFA_OF_CLUSTER = Message(
    "the cluster was created with --require-efa: `cloudddp down` and `cloudddp up` replace its machines; "
    "`cloudddp exec -- 'fi_info -p efa'` shows the reason"
)
_EFA_OF_SETTINGS = Message(
    "create the cluster with `cloudddp up --require-efa`, or set require_efa = false in cloudddp.toml"
)


def check_nodes(
    cluster: Cluster, probes: Mapping[int, ProbeReply], config: Config, progress: Progress
) -> None:
    """Raise CloudDDPError where a job runs, NodeError for a node that lacks EFA, GPUs or Python; report
    clocks that differ."""
    now = datetime.now(UTC).timestamp()
    for node, reply in probes.items():
        for job in reply.running:
            raise CloudDDPError(
                f"job {job} is still running on node {node}",
                hint=f"`cloudddp logs -f {q(job)}` follows it, `cloudddp cancel {q(job)}` stops it",
            )
        if (config.cluster.require_efa or cluster.require_efa) and not reply.efa:
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
                f"warning: the clock of node {node} differs from this computer's by {reply.time - now:+.0f} s"
            )
    counts = {reply.gpus for reply in probes.values()}
    if len(counts) > 1:
        progress(f"warning: the nodes report different numbers of GPUs: {sorted(counts)}")


def plans(
    cluster: Cluster, probes: Mapping[int, ProbeReply], config: Config, job: NewJob, *, require_efa: bool
) -> list[NodePlan]:
    """Return what each node starts. Nodes of a job are numbered from 0, also where the cluster has lost some
    of its nodes."""
    inside = (config.job.python or containers.PYTHON) if config.job.container else ""
    hosts = [
        Host(
            rank=number,
            private_ip=cluster.nodes[node].private_ip,
            interface=reply.interface,
            gpus=reply.gpus,
            cpus=reply.cpus,
            python=inside or reply.python or config.job.python,
            free_port=reply.free_port,
        )
        for number, (node, reply) in enumerate(sorted(probes.items()))
    ]
    found = ranks.plan(
        config.job, hosts, job.script, job_id=job.id, cluster=cluster.name, require_efa=require_efa
    )
    return [replace(one, node=node) for one, node in zip(found, sorted(probes), strict=True)]


def _set_up(
    runner: Runner,
    probes: Mapping[int, ProbeReply],
    config: Config,
    job: NewJob,
    shared: Mapping[int, tuple[SharedFolder, ...]],
    files: Snapshot,
    progress: Progress,
    on_line: OnSetupLine,
) -> dict[int, Container]:
    """Run the setup commands on the nodes where they have not run yet; return the containers of the job, with
    the ids of their images. Raises NodeError, Interrupted."""
    images = containers.of_nodes(config.job, probes)
    copied = [one.source for one in config.data if one.is_s3]
    if copied:
        progress(f"copying {', '.join(copied)} where it differs")
    if images:
        progress(f"pulling {config.job.container} where it is missing")
    if config.setup.run:
        progress("running the setup commands where they have not run yet")
    if config.shared:
        progress(f"mounting {', '.join(one.place for one in config.shared)} on all nodes")
    if not (copied or config.setup.run or images or config.shared):
        return {}

    read = package_inputs.read(files.root, config.setup)
    inputs = [one for one in sorted(files.manifest) if read.has(one, is_data=files.is_data(one))]

    def request(node: int) -> SetupRequest:
        return SetupRequest(
            job=job.id,
            node=node,
            project=PROJECT,
            script=job.script.shown,
            commands=tuple(config.setup.run),
            inputs=tuple(dict.fromkeys((*inputs, *config.setup.inputs))),
            env=dict(config.job.env),
            python=config.job.python,  # which a command may create
            paths=config.data_paths,
            data=tuple(DataCopy(*_bucket_of(one.source), one.place) for one in config.data if one.is_s3),
            container=images.get(node),
            shared=shared[node],
        )

    requests = {node: request(node) for node in probes}
    # What a node exports is there before others mount it.
    first = {
        node: replace(one, commands=(), inputs=(), data=(), container=None)
        for node, one in requests.items()
        if any(folder.clients for folder in one.shared)
    }
    try:
        replies = _set_up_nodes(runner, first, on_line) if first else {}
        if not any(reply.exit_code or reply.cancelled for reply in replies.values()):
            replies = _set_up_nodes(runner, requests, on_line)
    except Exception:  # the other nodes continue with it
        _abort(runner, job.id, progress)
        raise
    if any(reply.cancelled for reply in replies.values()):
        raise Interrupted(
            f"job {job.id} was cancelled during its setup",
            hint="`cloudddp launch SCRIPT` starts it again",
        )
    for node, reply in replies.items():
        if reply.exit_code:
            raise _setup_error(node, reply, config, read)
    return {node: replace(one, image=replies[node].image or one.image) for node, one in images.items()}


def _bucket_of(url: str) -> tuple[str, str]:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return bucket, prefix.strip("/")


def _set_up_nodes(
    runner: Runner, requests: Mapping[int, SetupRequest], on_line: OnSetupLine
) -> dict[int, SetupReply]:
    splitters = {node: LineSplitter() for node in requests}

    lock = threading.Lock()  # each node has a thread of its own

    def show(node: int, data: bytes, *, last: bool = False) -> None:
        with lock:
            for line in splitters[node].feed(data, last=last):
                on_line(node, line)

    try:
        return client.call_all(runner, requests, timeout=None, on_stderr=show)
    finally:
        for node in requests:
            show(node, b"", last=True)


def _setup_error(node: int, reply: SetupReply, config: Config, read: PackageInputs) -> NodeError:
    """Return the error for a setup that failed. Its output was shown as it was written."""
    if reply.image:
        return containers.error(node, reply, config.job.container or "")
    command = one_line(reply.command)
    if reply.data:
        last = reply.output.strip().rpartition("\n")[2] or f"exit code {reply.exit_code}"
        why = one_line(last.removeprefix(f"{command.rstrip('/')}: "), 400)
        if command.startswith("[[shared]]"):
            hint: str = Message(
                "give an --image that has what is missing; or `cloudddp up`, correct it with `cloudddp exec "
                "-- COMMAND`, then launch"
            )
            return NodeError(f"node {node}: {command} was not mounted: {why}", hint=hint)
        return NodeError(
            f"node {node}: {command} was not copied: {why}",
            hint="correct [[data]] in cloudddp.toml, or the role of cluster.instance_profile, and repeat the "
            "command",
        )
    listed = config.setup.environment
    if listed and reply.command.startswith(packages.title(listed)):
        return install_failure.error(node, reply, config.setup, read)
    return NodeError(
        f"node {node}: setup command exited with code {reply.exit_code}: {command}",
        hint=install_failure.hint_of_command(reply),
    )


def _abort(runner: Runner, job_id: str, progress: Progress) -> None:
    """Stop what has started, and name the nodes on which that may not have succeeded."""
    for node in abort_launch(runner, job_id):
        progress(f"warning: job {job_id} may still run on node {node}; cancel it before the next launch")

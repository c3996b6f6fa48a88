"""SSH connections to the nodes of a cluster, and the agent's probe of each node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cloudddp import timings
from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.codec import MAX_REPLY
from cloudddp.agent.protocol.machine import MAX_FOLDERS, ProbeReply, ProbeRequest
from cloudddp.cluster import host_keys
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.ssh_routes import SSHRoutes, remembered
from cloudddp.config import timing
from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import CloudDDPError, NodeError, ProgressCallback, ignore_progress
from cloudddp.local_state import USUAL_USER, ClusterFolder
from cloudddp.ssh import paramiko_fixes
from cloudddp.ssh.fleet import Fleet, Outcome
from cloudddp.ssh.target import Target

loaded_meanwhile = paramiko_fixes.loaded_meanwhile
PROJECT = "project"  # the folder with the user's files, in a node's home
_PROBE_SECONDS = 60.0  # for everything but the boot and the GPUs


def targets(cluster: Cluster, spec: ClusterSpec) -> tuple[dict[int, Target], dict[int, Exception]]:
    """Return where each node answers SSH, by node rank, and why other nodes cannot: EC2 says that they do not
    run.

    Raises CloudDDPError if this computer has no key.
    """
    folder = ClusterFolder(cluster.id)
    private_key = folder.login_key()
    known = host_keys.read(folder)
    record = folder.record()
    user = spec.user or (record.user if record else USUAL_USER)
    routes = SSHRoutes(remembered(spec, record), cluster.region, user)
    found: dict[int, Target] = {}
    lost: dict[int, Exception] = {}
    for rank, instance in cluster.nodes.items():
        try:
            cluster.require_running(rank)
            found[rank] = Target(
                label=f"node {rank} ({instance.id})",
                host=routes.address(rank, instance),
                port=spec.ssh_port,
                user=user,
                private_key=private_key,
                host_keys=known.accepted(instance.id),
                id=instance.id,
                route=routes.route(rank, instance),
            )
        except CloudDDPError as error:
            lost[rank] = error
    return found, lost


# Called several times a second while nodes boot; may raise to end the wait.
Meanwhile = Callable[[Fleet], None]
Dial = Callable[[Cluster, ClusterSpec, float, Meanwhile], Runner]


def dial(cluster: Cluster, spec: ClusterSpec, within: float, meanwhile: Meanwhile) -> Fleet:
    """Return open SSH connections to every node. The nodes may still share the host key of their user
    data."""
    found, lost = targets(cluster, spec)
    Outcome(errors=lost).all()
    fleet = Fleet(found)
    try:
        fleet.connect(within=within, meanwhile=lambda: meanwhile(fleet))
    except BaseException:
        fleet.close()
        raise
    return fleet


@timings.spanned("connections")
def connect(
    cluster: Cluster,
    spec: ClusterSpec,
    within: float = 0.0,
    meanwhile: Meanwhile = lambda _: None,
    *,
    progress: ProgressCallback = ignore_progress,
    dial: Dial = dial,
) -> Runner:
    """Return open SSH connections to every node, retrying for `within` seconds while nodes boot.

    Afterwards each node has a host key of its own: an interrupted replacement is completed first.
    """
    folder, instances = _key_owners(cluster)
    with host_keys.exclusive(folder, instances, progress):
        runner = dial(cluster, spec, within, meanwhile)
        try:
            host_keys.replace_shared_key(
                runner, folder, instances, whole=not cluster.missing, partly=False, progress=progress
            )
        except BaseException:
            runner.close()
            raise
    return runner


@timings.spanned("connections")
def connect_reachable(
    cluster: Cluster, spec: ClusterSpec, *, progress: ProgressCallback = ignore_progress
) -> tuple[Runner, dict[int, Exception]]:
    """Connect to the nodes that answer, as `connect` does; return also why others do not. Raises if none
    answers."""
    folder, instances = _key_owners(cluster)
    with host_keys.exclusive(folder, instances, progress):
        found, lost = targets(cluster, spec)
        if not found:
            Outcome(errors=lost).all()
        fleet = Fleet(found)
        try:
            unreachable = fleet.connect(partly=True)
            failed = host_keys.replace_shared_key(
                fleet, folder, instances, whole=not cluster.missing, partly=True, progress=progress
            )
            fleet.leave_out(failed)
            if not fleet.targets:
                Outcome(errors=failed).all()
        except BaseException:
            fleet.close()
            raise
    return fleet, {**lost, **unreachable, **failed}


def complete_host_keys(cluster: Cluster, spec: ClusterSpec, *, progress: ProgressCallback) -> None:
    """Complete an interrupted replacement of host keys, for a caller that connects by itself (`cloudddp
    ssh`)."""
    if host_keys.incomplete(*_key_owners(cluster)):
        connect_reachable(cluster, spec, progress=progress)[0].close()


def _key_owners(cluster: Cluster) -> tuple[ClusterFolder, dict[int, str]]:
    folder = ClusterFolder(cluster.id)
    folder.login_key()
    return folder, {rank: instance.id for rank, instance in cluster.nodes.items()}


def probe(
    runner: Runner,
    cluster: Cluster,
    *,
    manifest: str = "",
    python: str = "",
    wait_boot: float = 0.0,
    gpus: int = 0,
    new: bool = False,
    efa: int = 0,
    only_files: bool = False,
    then: Sequence[str] = (),
) -> dict[int, ProbeReply]:
    """Return the agent's probe reply for each node. Raises NodeError if no interface has the node's address.

    The boot may take `wait_boot` seconds; after it, a node has Timing.gpus seconds to show all `gpus` GPUs. 0
    does not wait for any. `new` nodes get the agent with the request; others only if it turns out that they
    do not have it. They look at the timer of their deadline, import torch and use each GPU, for up to
    Timing.torch seconds. EFA devices are counted where `efa`, the number expected, is not 0. `only_files`: no
    GPUs are counted. `then`: steps that are likely to follow.
    """
    gpu_seconds = timing.current().gpus if gpus else 0.0
    torch_seconds = timing.current().torch if new else 0.0

    def request(rank: int) -> ProbeRequest:
        return ProbeRequest(
            project=PROJECT,
            private_ip=cluster.nodes[rank].private_ip,
            python=python,
            manifest_digest=manifest,
            boot_seconds=wait_boot,
            gpus=gpus,
            gpu_seconds=gpu_seconds,
            torch_seconds=torch_seconds,
            efa=efa,
            deadline=new,
            only_files=only_files,
        )

    replies = client.call_all(
        runner,
        request,
        ship=new,
        # GPUs have gpu_seconds to be listed, and again to be usable.
        timeout=_PROBE_SECONDS + wait_boot + 2 * gpu_seconds + torch_seconds,
        limit=MAX_FOLDERS if manifest else MAX_REPLY,
        then=then,
    )
    for rank, reply in replies.items():
        if not reply.interface:
            node = cluster.nodes[rank]
            raise NodeError(
                f"node {rank} ({node.id}): no interface has its private address {node.private_ip}"
            )
    return replies

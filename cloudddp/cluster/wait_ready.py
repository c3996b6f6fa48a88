"""Waits until a cluster is ready: every node runs, answers SSH, shows its GPUs and has its deadline armed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from cloudddp import timings
from cloudddp.agent.protocol.machine import BootStage, ProbeReply, ProbeRequest
from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import power_minutes
from cloudddp.aws.inventory import Instance
from cloudddp.aws.removal import POLL_SECONDS
from cloudddp.cluster import name_lock, node_addresses
from cloudddp.cluster.connect import PROJECT, Dial, Meanwhile, connect, probe
from cloudddp.cluster.launch_errors import LaunchAttempt, Next, NotLaunched, next_step
from cloudddp.cluster.lookup import refresh
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.preconditions import hint_of_end
from cloudddp.config import timing
from cloudddp.config.cluster_spec import Access, ClusterSpec, Placement, connection_mode
from cloudddp.errors import (
    AWSError,
    CloudDDPError,
    Message,
    NodeError,
    ProgressCallback,
    StepUpdate,
    StepWarning,
)
from cloudddp.formats import plural
from cloudddp.ssh.fleet import Fleet
from cloudddp.text import node_list, one_line

_CHECK_SECONDS = 15.0  # between two checks, while waiting for SSH, that the instances are still live
_NAMED = 8  # nodes; of more only the number is shown
# What a node waits for, by what it has reached.
_WAITS = {None: "boot", BootStage.BOOTED: "GPUs", BootStage.GPUS: "PyTorch"}
_LEAST_BOOT_SECONDS = 30.0  # for cloud-init, however late SSH answered


def ready_minutes(spec: ClusterSpec, gpus: int) -> float:
    """Return the minutes that a node may take to boot: as set, or by type and number of GPUs. Pure."""
    return spec.ready_minutes or max(power_minutes(one, gpus) for one in spec.types)


@timings.span("wait: nodes run")
def wait_running(
    aws: AWS,
    spec: ClusterSpec,
    cluster_id: str,
    progress: ProgressCallback,
    *,
    only: frozenset[str] = frozenset(),
) -> Cluster:
    """Wait until every node runs and has its addresses, for which Elastic IPs are associated.

    `only`: the instances to wait for, of which the cluster that is returned consists; none: all. Nodes that
    have run for Timing.settle seconds without a public address are returned as they are. One call per poll,
    two while addresses are missing. Raises NotLaunched if EC2 lacks the capacity after all, AWSError,
    CloudDDPError.
    """
    began = time.monotonic()
    public = connection_mode(spec) == "public"
    pause, associated, all_run_since = 0.2, not public, math.inf
    shown: Collection[int] | None = None
    while True:
        found = refresh(aws, spec.name, cluster_id)
        found = found.only(only) if found and only else found
        running = _running(found, spec) if found else {}
        if found and not associated and len(running) == spec.nodes:
            all_run_since = min(all_run_since, time.monotonic())
            if all(node.public_ip for node in running.values()):
                associated = True
            elif associated := node_addresses.associate(aws, found, progress):
                continue
            elif time.monotonic() > all_run_since + timing.current().settle:
                return found  # nodes of another route: the connection names those without a public address
        ready = {rank for rank, node in running.items() if node.public_ip or not public}
        if found and len(ready) == spec.nodes:
            if shown is not None:
                progress(StepUpdate(f"nodes running: {spec.nodes} of {spec.nodes}"))
            return found
        minutes = ready_minutes(spec, found.gpus if found else 0)
        if time.monotonic() > began + minutes * timing.current().minute:
            raise CloudDDPError(
                f"{spec.nodes - len(ready)} of {spec.nodes} nodes do not run after {minutes:g} minutes",
                hint="for nodes that start more slowly, set a larger ready_minutes in cloudddp.toml",
            )
        if ready != shown:
            shown = ready
            missing = found.nodes.keys() - ready if found else range(spec.nodes)
            progress(StepUpdate(f"nodes running: {len(ready)} of {spec.nodes}; not yet: {_named(missing)}"))
        time.sleep(pause)
        pause = min(pause * 1.5, POLL_SECONDS)


def _named(nodes: Collection[int]) -> str:
    return node_list(nodes) if len(nodes) <= _NAMED else f"{len(nodes)} nodes"


def _running(cluster: Cluster, spec: ClusterSpec) -> dict[int, Instance]:
    """Return the nodes that run. Raises AWSError, or NotLaunched, if one has ended or stopped."""
    lost = [node for node in cluster.nodes.values() if node.state in ("stopping", "stopped")]
    if len(cluster.nodes) < spec.nodes:
        lost += cluster.gone
    # A node that is shutting down may not have its reason yet, which decides whether another zone is tried.
    if lost and not any(node.state == "shutting-down" and not node.reason_code for node in lost):
        code, why = lost[0].reason_code, lost[0].reason or lost[0].state
        error = AWSError(  # as AWS's own: the launch is repeated in another zone where that may help
            f"{len(lost)} of {spec.nodes} nodes ended while starting: {lost[0].id}: {why}",
            code=code,
            hint=hint_of_end(spec, code, lost[0].reason),
        )
        if next_step(code) is not Next.ZONE:
            raise error
        raise NotLaunched(LaunchAttempt(cluster.region, lost[0].zone, error), accepted=True)
    return {rank: node for rank, node in cluster.nodes.items() if node.state == "running" and node.private_ip}


def make_ready(aws: AWS, cluster: Cluster, spec: ClusterSpec, progress: ProgressCallback, dial: Dial) -> None:
    """Connect to every node, give it a host key of its own, and check interface, GPUs, EFA and deadline.

    Raises NodeError. Too few GPUs are a warning with allow_cpu, too few EFA devices unless it is required."""
    spec = replace(spec, require_efa=spec.require_efa or cluster.require_efa)
    limits = timing.current()
    minutes = ready_minutes(spec, cluster.gpus)
    waiting = f"waiting for SSH on every node, for up to {minutes:g} min"
    progress(waiting)
    began = time.monotonic()
    patience = minutes * limits.minute
    meanwhile = _while_booting(aws, cluster, spec, progress, waiting)
    runner = connect(cluster, spec, patience, meanwhile, progress=progress, dial=dial)
    progress(StepUpdate("SSH answers on every node"))
    try:
        checking = "checking GPUs, interfaces and the deadline on every node: waits until it has booted"
        if cluster.gpus:
            checking += f", then up to {limits.gpus:.0f} s for its {plural(cluster.gpus, 'GPU')}"
        progress(checking)
        request = ProbeRequest(
            PROJECT,
            "",
            boot_seconds=max(patience - (time.monotonic() - began), _LEAST_BOOT_SECONDS),
            gpus=cluster.gpus,
            gpu_seconds=limits.gpus if cluster.gpus else 0.0,
            torch_seconds=limits.torch,
            efa=max(cluster.efa, int(spec.require_efa)),
            deadline=True,
        )
        found = probe(runner, cluster, request, on_stage=_stages(checking, cluster.nodes, progress))
        progress(StepUpdate("checked GPUs, interfaces and the deadline on every node"))
    finally:
        runner.close()
    for rank, reply in found.items():
        _check_node(f"node {rank} ({cluster.nodes[rank].id})", request, reply, spec, progress)


def _check_node(
    node: str, wanted: ProbeRequest, reply: ProbeReply, spec: Placement, progress: ProgressCallback
) -> None:
    """Raise NodeError, or warn, about what a node lacks."""
    if not reply.deadline_armed:
        raise NodeError(
            f"{node}: its deadline is not armed, so it could run indefinitely",
            hint="does the image run cloud-init and systemd? Deep Learning AMIs do",
        )
    if problem := missing_gpus(reply, wanted.gpus):
        if not spec.allow_cpu:
            raise NodeError(f"{node} {problem}", hint=_other_machines("is the image right for the type?"))
        progress(StepWarning(f"{node} {problem}"))
    if reply.efa < wanted.efa:
        shows = f"{node} shows {reply.efa} of {wanted.efa} EFA devices (fi_info -p efa)"
        if spec.require_efa:
            raise NodeError(shows, hint=_other_machines("does the image have the EFA driver and libfabric?"))
        progress(
            StepWarning(
                f"{shows}: NCCL may use TCP between nodes, which is slower (--require-efa refuses this)"
            )
        )


def _stages(step: str, nodes: Iterable[int], progress: ProgressCallback) -> Callable[[int, BootStage], None]:
    """Return a callback that shows what the nodes still wait for, as they report it."""
    waits, lock = dict.fromkeys(nodes, _WAITS[None]), threading.Lock()

    def show(node: int, reached: BootStage) -> None:
        with lock:
            waits[node] = _WAITS[reached]
            groups = {what: [node for node in waits if waits[node] == what] for what in _WAITS.values()}
            shown = "; ".join(f"{what}: {_named(found)}" for what, found in groups.items() if found)
            progress(StepUpdate(f"{step}; waiting for {shown}"))

    return show


def _other_machines(question: str) -> str:
    return Message(
        "other machines may be whole: `cloudddp up`, after `cloudddp down` if the cluster still exists; "
        f"{question}"
    )


def missing_gpus(reply: ProbeReply, gpus: int) -> str:
    """Return which of a node's GPUs cannot be used, or ''. Pure."""
    if reply.gpus < gpus:
        return f"shows {reply.gpus} of {gpus} GPUs (nvidia-smi -L)"
    if reply.torch_gpus is not None and reply.torch_gpus < gpus:
        why = f": {one_line(reply.torch_error)}" if reply.torch_error else ""
        return f"has {reply.torch_gpus} of {gpus} GPUs that PyTorch can use{why}"
    return ""


def check_intact(aws: AWS, cluster: Cluster) -> None:
    """Raise NodeError if another command removes the cluster: only a whole one is reported as ready.

    Instances first, then the name lock, as `down` does: one that begins later removes a ready cluster."""
    now = {i.id: i for i in inventory.instances(aws, inventory.with_id(cluster.id))}
    for rank, node in cluster.nodes.items():
        found = now.get(node.id)
        if found is None or found.state != "running":
            why = "no longer exists" if found is None else f"is {found.state}: {found.reason}"
            raise NodeError(f"node {rank} ({node.id}) {why}")
    if name_lock.lost(aws, cluster.name, cluster.id):
        raise NodeError(f"cluster {cluster.name!r} no longer holds its name")


def _while_booting(
    aws: AWS, cluster: Cluster, spec: Access, progress: ProgressCallback, waiting: str
) -> Meanwhile:
    """Return what to do while nodes boot. `waiting` is the step that is shown meanwhile.

    It raises NodeError once a node has ended: waiting is useless, and other nodes are billed. After some
    seconds it shows why the last attempt failed; for a node that has answered nothing for a minute, the
    addresses that may connect; with private addresses at once, since a VPN may be down.
    """
    began = checked = time.monotonic()
    named = False
    limits = timing.current()
    unanswered = limits.unanswered if connection_mode(spec) == "public" else limits.reason

    def check(fleet: Fleet) -> None:
        nonlocal checked, named
        silent = fleet.silent_for()
        if not named and silent is not None and silent[1] >= unanswered:
            named = True
            progress(_who_may_connect(aws, cluster, spec, *silent))
        missing, reason = fleet.missing(), ""
        if time.monotonic() - began >= limits.reason:
            reason = fleet.last_failure()
        text = f"{waiting}; not yet: {_named(missing)}" + (f"; {reason}" if reason else "")
        if missing:
            progress(StepUpdate(text))  # which shows it when its interval is over, and once
        if time.monotonic() - checked < _CHECK_SECONDS:
            return
        checked = time.monotonic()
        found = {i.id: i for i in inventory.instances(aws, inventory.with_id(cluster.id))}
        for rank, node in cluster.nodes.items():
            now = found.get(node.id)
            if now is not None and now.state not in ("pending", "running"):
                how = "was stopped" if now.live else "ended"
                raise NodeError(f"node {rank} ({node.id}) {how} while booting: {now.reason or now.state}")

    return check


def _who_may_connect(aws: AWS, cluster: Cluster, spec: Access, node: int, seconds: float) -> str:
    """Return what to do about a silent node: SSH may leave by another address than HTTPS (VPN, NAT)."""
    groups = inventory.security_groups(aws, inventory.with_id(cluster.id))
    blocks = sorted({block for group in groups for block in inventory.ingress_blocks(group, spec.ssh_port)})
    admitted = (
        f"no answer from node {node} for {seconds:.0f} s; still waiting. SSH is open to "
        f"{', '.join(blocks) or 'no address'}"
    )
    if spec.proxy_command is not None:
        return f"{admitted}, and it goes through cluster.proxy_command"
    if connection_mode(spec) == "private":
        return f"{admitted}: is the VPN up, and is the address that the nodes see behind it one of these?"
    return Message(
        f"{admitted}: if this computer connects from another one, stop this command (Ctrl-C) and give it: "
        "`cloudddp up --ssh-from BLOCK`, or run `cloudddp allow-me` in another terminal"
    )

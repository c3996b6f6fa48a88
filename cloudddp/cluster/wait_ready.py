"""Waits until a cluster is ready: every node runs, answers SSH, shows its GPUs and has its deadline armed."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cloudddp import timings
from cloudddp.agent.protocol.machine import BootStage, ProbeReply
from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import power_minutes
from cloudddp.aws.removal import POLL_SECONDS
from cloudddp.cluster import name_lock
from cloudddp.cluster.connect import Dial, Meanwhile, connect, probe
from cloudddp.cluster.lookup import refresh
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.preconditions import hint_of_end
from cloudddp.config import timing
from cloudddp.config.spec import ClusterSpec, connection_mode
from cloudddp.errors import AWSError, CloudDDPError, Message, NodeError, ProgressCallback, StepUpdate
from cloudddp.formats import counted
from cloudddp.ssh.fleet import Fleet
from cloudddp.text import node_list, one_line

_CHECK_SECONDS = 15.0  # between two checks, while waiting for SSH, that the instances are still live
_NAMED = 8  # nodes; of more only the number is shown
# What a node waits for, by what it has reached.
_WAITS = {None: "boot", BootStage.BOOTED: "GPUs", BootStage.GPUS: "PyTorch"}
_LEAST_BOOT_SECONDS = 30.0  # for cloud-init, however late SSH answered


def ready_minutes(spec: ClusterSpec, gpus: int) -> float:
    """Return the minutes that a node may take to boot: as set, or by the type and its number of GPUs.
    Pure."""
    return spec.ready_minutes or max(power_minutes(one, gpus) for one in spec.types)


@timings.span("wait: nodes run")
def wait_running(
    aws: AWS,
    spec: ClusterSpec,
    cluster_id: str,
    gpus: int,
    progress: ProgressCallback,
    *,
    addressed: bool = True,
    only: frozenset[str] = frozenset(),
) -> Cluster:
    """Poll until every node runs and has its addresses. One call per poll, whatever the number of nodes.

    `addressed`: whether nodes that are to have a public address have it, or get it later. `only`: the
    instances to wait for, if not all; the cluster that is returned consists of them.
    """
    minutes = ready_minutes(spec, gpus)
    deadline = time.monotonic() + minutes * timing.current().minute
    pause = 0.2
    shown: Collection[int] | None = None
    while True:
        found = refresh(aws, spec.name, cluster_id)
        found = found.only(only) if found and only else found
        running = _running(found, spec, addressed) if found else frozenset()
        if found and len(running) == spec.nodes:
            if shown is not None:
                progress(StepUpdate(f"nodes running: {spec.nodes} of {spec.nodes}"))
            return found
        if time.monotonic() > deadline:
            raise CloudDDPError(
                f"{spec.nodes - len(running)} of {spec.nodes} nodes do not run after {minutes:g} minutes",
                hint="for nodes that start more slowly, set a larger ready_minutes in cloudddp.toml",
            )
        if running != shown:
            shown = running
            missing = found.nodes.keys() - running if found else range(spec.nodes)
            progress(StepUpdate(f"nodes running: {len(running)} of {spec.nodes}; not yet: {_named(missing)}"))
        time.sleep(pause)
        pause = min(pause * 1.5, POLL_SECONDS)


def _named(nodes: Collection[int]) -> str:
    return node_list(nodes) if len(nodes) <= _NAMED else f"{len(nodes)} nodes"


def _running(cluster: Cluster, spec: ClusterSpec, addressed: bool) -> frozenset[int]:
    """Return the nodes that run and have addresses. Raises CloudDDPError if one has ended or stopped."""
    lost = [node for node in cluster.nodes.values() if node.state in ("stopping", "stopped")]
    if len(cluster.nodes) < spec.nodes:
        lost += cluster.gone
    # A node that is shutting down may not have its reason yet, which decides whether another zone is tried.
    if lost and not any(node.state == "shutting-down" and not node.reason_code for node in lost):
        why = lost[0].reason or lost[0].state
        # As AWS's own error, so that the launch is repeated in another zone where that may help.
        raise AWSError(
            f"{len(lost)} of {spec.nodes} nodes ended while starting: {lost[0].id}: {why}",
            code=lost[0].reason_code,
            hint=hint_of_end(spec, lost[0].reason_code, lost[0].reason),
        )
    public = addressed and connection_mode(spec) == "public"
    return frozenset(
        rank
        for rank, node in cluster.nodes.items()
        if node.state == "running" and node.private_ip and (node.public_ip or not public)
    )


def make_ready(
    aws: AWS,
    cluster: Cluster,
    spec: ClusterSpec,
    progress: ProgressCallback,
    dial: Dial,
) -> None:
    """Connect to every node, give it a host key of its own, and check interface, GPUs, EFA devices and
    deadline.

    Raises NodeError. Missing GPUs are a warning with allow_cpu, missing EFA devices unless EFA is required.
    """
    expected = _Hardware.of(cluster, spec)
    minutes = ready_minutes(spec, expected.gpus)
    waiting = f"waiting for SSH on every node, for up to {minutes:g} min"
    progress(waiting)
    began = time.monotonic()
    patience = minutes * timing.current().minute
    meanwhile = _while_booting(aws, cluster, spec, progress, waiting)
    runner = connect(cluster, spec, patience, meanwhile, progress=progress, dial=dial)
    progress(StepUpdate("SSH answers on every node"))
    try:
        checking = "checking GPUs, interfaces and the deadline on every node: waits until it has booted"
        if expected.gpus:
            count = counted(expected.gpus, "GPU")
            checking += f", then up to {timing.current().gpus:.0f} s for its {count}"
        progress(checking)
        stages = _Stages(checking, cluster.nodes, progress)
        left = max(patience - (time.monotonic() - began), _LEAST_BOOT_SECONDS)
        found = probe(
            runner,
            cluster,
            wait_boot=left,
            gpus=expected.gpus,
            new=True,
            efa=expected.efa,
            on_stage=stages,
        )
        progress(StepUpdate("checked GPUs, interfaces and the deadline on every node"))
    finally:
        runner.close()
    for rank, reply in found.items():
        if not reply.deadline_armed:
            raise NodeError(
                f"node {rank} ({cluster.nodes[rank].id}): its deadline is not armed, so it could run "
                "indefinitely",
                hint="does the image run cloud-init and systemd? Deep Learning AMIs do",
            )
        expected.check(f"node {rank} ({cluster.nodes[rank].id})", reply, progress)


@dataclass(frozen=True, slots=True)
class _Hardware:
    """What each node has to show, and whether a node that shows less is refused."""

    gpus: int
    allow_cpu: bool
    efa: int
    require_efa: bool

    @classmethod
    def of(cls, cluster: Cluster, spec: ClusterSpec) -> _Hardware:
        """Return what the cluster was created with, from its tags."""
        require_efa = spec.require_efa or cluster.require_efa
        return cls(cluster.gpus, spec.allow_cpu, max(cluster.efa, int(require_efa)), require_efa)

    def check(self, node: str, reply: ProbeReply, progress: ProgressCallback) -> None:
        """Raise NodeError, or warn, about what a node lacks."""
        if problem := missing_gpus(reply, self.gpus):
            if not self.allow_cpu:
                raise NodeError(f"{node} {problem}", hint=_other_machines("is the image right for the type?"))
            progress(f"warning: {node} {problem}")
        if reply.efa < self.efa:
            shows = f"{node} shows {reply.efa} of {self.efa} EFA devices (fi_info -p efa)"
            if self.require_efa:
                raise NodeError(
                    shows, hint=_other_machines("does the image have the EFA driver and libfabric?")
                )
            progress(
                f"warning: {shows}: NCCL may use TCP between nodes, which is slower (--require-efa refuses "
                "this)"
            )


class _Stages:
    """Shows what the nodes still wait for, as they report it."""

    def __init__(self, step: str, nodes: Iterable[int], progress: ProgressCallback) -> None:
        self._step, self._progress = step, progress
        self._waits = dict.fromkeys(nodes, _WAITS[None])
        self._lock = threading.Lock()

    def __call__(self, node: int, reached: BootStage) -> None:
        with self._lock:
            self._waits[node] = _WAITS[reached]
            nodes = {
                what: [one for one in self._waits if self._waits[one] == what] for what in _WAITS.values()
            }
            shown = "; ".join(f"{what}: {_named(found)}" for what, found in nodes.items() if found)
            self._progress(StepUpdate(f"{self._step}; waiting for {shown}"))


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
    """Raise NodeError if another command has begun to remove the cluster: only a whole one is reported as
    ready.

    The instances are checked before the name lock, because `down` terminates instances first: a `down` that
    begins after this check removes a cluster that was ready.
    """
    now = {i.id: i for i in inventory.instances(aws, inventory.with_id(cluster.id))}
    for rank, node in cluster.nodes.items():
        found = now.get(node.id)
        if found is None or found.state != "running":
            why = "does not exist any more" if found is None else f"is {found.state}: {found.reason}"
            raise NodeError(f"node {rank} ({node.id}) {why}")
    if name_lock.lost(aws, cluster.name, cluster.id):
        raise NodeError(f"cluster {cluster.name!r} no longer holds its name")


def _while_booting(
    aws: AWS, cluster: Cluster, spec: ClusterSpec, progress: ProgressCallback, waiting: str
) -> Meanwhile:
    """Return what to do while nodes boot. `waiting` is the step that is shown meanwhile.

    It raises NodeError once a node has ended: waiting is useless, and other nodes are billed. After some
    seconds it adds to the step why the last attempt failed. Once a node has answered nothing for a minute, it
    names the addresses that may connect; with private addresses at the first attempt without an answer, since
    a VPN may be down.
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


def _who_may_connect(aws: AWS, cluster: Cluster, spec: ClusterSpec, node: int, seconds: float) -> str:
    """Return what to do about a node that does not answer: SSH may leave by another address than HTTPS (VPN,
    NAT pool)."""
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

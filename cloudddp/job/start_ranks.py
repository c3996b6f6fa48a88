"""Starting the ranks of a job: the agents of all nodes at once, which connect to each other before a rank
runs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime

from cloudddp import timings
from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.gang import Gang, Unreachable
from cloudddp.agent.protocol.machine import ProbeReply
from cloudddp.agent.protocol.phases import Peer
from cloudddp.agent.protocol.sharing import SnapshotSearch, matches
from cloudddp.agent.protocol.start import MAX_LEFT, Container, Deadline, OnStall, StartReply, StartRequest
from cloudddp.cluster.connect import PROJECT
from cloudddp.cluster.model import Cluster
from cloudddp.config import timing
from cloudddp.config.spec import Config, JobSpec
from cloudddp.errors import NodeError
from cloudddp.formats import moment
from cloudddp.job.job_request import NewJob
from cloudddp.job.launch_record import s3_destination_of
from cloudddp.job.ranks import NodePlan
from cloudddp.text import one_line

_LISTED_PAIRS = 4
# Name -> the parts of the start at which it begins and ends.
_LAPS = {
    "supervisor": ("step", "supervisor"),
    "mesh": ("supervisor", "mesh"),
    "preflight": ("supervisor", "preflight"),
}
_LISTED_PROBLEMS = 6


def start(
    runner: Runner,
    cluster: Cluster,
    probes: Mapping[int, ProbeReply],
    config: Config,
    plans: Sequence[NodePlan],
    job: NewJob,
    files: Collection[str],
    versions: Mapping[int, int],
    images: Mapping[int, Container],
) -> dict[int, StartReply]:
    """Start the ranks on every node, and return the replies by node. `files` are those of the project,
    `versions` what each node has of them, `images` in which containers ranks run. Raises NodeError; then
    ranks may run on some nodes."""
    gang, deadline = _gang(cluster, probes, config), _deadline(cluster)
    wrote = any(reply.wrote for reply in probes.values())
    looked_for = looking_for(config.job, files, nodes=len(plans), wrote=wrote)
    requests = {
        plan.node: StartRequest(
            job=job.id,
            node=plan.node,
            project=PROJECT,
            script=job.script.shown,
            env=plan.env,
            processes=plan.processes,
            ranks=plan.ranks,
            max_restarts=config.job.max_restarts,
            stop_grace=config.job.stop_grace,
            log_mb=config.job.log_mb,
            gang=gang,
            retries=config.job.retries,
            stall_minutes=config.job.stall_minutes,
            on_stall=OnStall(config.job.on_stall),
            alone_seconds=timing.current().alone,
            straggler_seconds=timing.current().straggler,
            save=config.job.save_minutes * timing.current().minute,
            deadline=deadline,
            poweroff=None if job.poweroff is None else job.poweroff * timing.current().minute,
            keep=job.keep * timing.current().minute,
            resumed_from=job.resumed_from,
            results=s3_destination_of(config, job.id),
            snapshots=looked_for,
            version=versions[plan.node],
            paths=config.data_paths,
            notify=config.job.notify_target,
            usd_hour=cluster.hour or 0.0,
            container=images.get(plan.node),
        )
        for plan in plans
    }
    replies = client.call_all(runner, requests)
    _record_laps(replies)
    unreachable = {node: reply.unreachable for node, reply in replies.items() if reply.unreachable}
    if unreachable:
        raise _not_connected(unreachable, gang, cluster)
    return replies


def looking_for(job: JobSpec, files: Collection[str], *, nodes: int, wrote: bool) -> SnapshotSearch | None:
    """Return what looks for the files that the nodes share and that are not `files` of the project, which the
    agents copy between them before ranks start (share/spread.py there); None where they share none.

    A pattern of job.share that matches a folder is for all that is in it. `wrote`: an earlier job wrote
    something. Pure.
    """
    patterns = tuple(found for one in job.share for found in (one, f"{one}/**")) or job.snapshots
    if not patterns:
        if not (wrote or job.retries):
            return None
        limit = max(1, int(job.share_mb * 2**20)) if nodes > 1 and job.share_mb else 0
        return SnapshotSearch(
            PROJECT, (), outputs=job.outputs, scratch=job.scratch, limit=limit, restarts_only=not wrote
        )
    own = {name for name in files if matches(name, patterns)}
    sendable = tuple(sorted(name for name in own if name.isprintable()))
    return SnapshotSearch(PROJECT, patterns, sendable, every=bool(job.share))


def _record_laps(replies: Mapping[int, StartReply]) -> None:
    """Record the parts of the start that the agents have reported, as spans: each one until the next, but for
    mesh and preflight, which run at the same time."""
    now = time.monotonic()
    for node, reply in replies.items():
        for name, (begin, end) in _LAPS.items():
            if begin in reply.reached and end in reply.reached:
                timings.add(
                    f"  on the node: {name}", now - reply.reached[begin], now - reply.reached[end], node
                )


def _deadline(cluster: Cluster) -> Deadline | None:
    """Return the cluster's deadline by a duration: the clock of a node may be wrong."""
    if cluster.expires is None:
        return None
    left = (cluster.expires - datetime.now(UTC)).total_seconds()
    if left <= 0:  # the tag is wrong: the nodes run
        return None
    return Deadline(min(left, MAX_LEFT), moment(cluster.expires))


def _gang(cluster: Cluster, probes: Mapping[int, ProbeReply], config: Config) -> Gang:
    """Return the nodes of a job, with a new secret."""
    peers = [
        Peer(node, cluster.nodes[node].private_ip, reply.agent_port, cluster.nodes[node].id)
        for node, reply in sorted(probes.items())
    ]
    return Gang(
        tuple(peers),
        secrets.token_hex(32),
        silence=config.job.heartbeat,
        join=timing.current().join,
        preflight=config.job.preflight,
    )


def _not_connected(found: Mapping[int, Unreachable], gang: Gang, cluster: Cluster) -> NodeError:
    """Return the error for nodes whose agents could not connect to each other, so that no rank was
    started."""
    for node, one in found.items():
        if one.error:
            return NodeError(f"node {node}: {one_line(one.error)}", hint="repeat `cloudddp launch`")
    problems = dict.fromkeys(one_line(text) for one in found.values() for text in one.problems)
    if problems:
        return NodeError(
            "the nodes are not fit for a job: " + "; ".join(list(problems)[:_LISTED_PROBLEMS]),
            hint="`cloudddp exec` runs a command on all nodes, to correct it; `cloudddp launch "
            "--no-preflight` starts all the same",
        )
    ports = {peer.node: f"{peer.address}:{peer.port}" for peer in gang.peers}
    pairs = {
        (node, other): reason for node, one in found.items() for other, reason in sorted(one.to.items())
    } or {(other, node): "it did not connect" for node, one in found.items() for other in one.by}
    if not pairs:
        nodes = ", ".join(map(str, sorted(found)))
        return NodeError(
            f"not all nodes were ready in time; node {nodes} gave up",
            hint="repeat `cloudddp launch`",
        )
    listed = "; ".join(
        f"node {node} cannot connect to node {other} ({ports.get(other, 'unknown')}): {one_line(reason)}"
        for (node, other), reason in sorted(pairs.items())[:_LISTED_PAIRS]
    )
    more = f"; and {len(pairs) - _LISTED_PAIRS} more" if len(pairs) > _LISTED_PAIRS else ""
    groups = sorted({group for node in cluster.nodes.values() for group in node.groups})
    rule = (
        f"ec2 authorize-security-group-ingress --region {cluster.region} --group-id {groups[0]} "
        f"--ip-permissions 'IpProtocol=-1,UserIdGroupPairs=[{{GroupId={groups[0]}}}]'"
        if groups
        else ""
    )
    return NodeError(
        f"{listed}{more}",
        hint="the ranks need every port between the nodes: check the rules of the cluster's security group "
        "(inbound and outbound, all traffic within the group) and the network ACLs of its subnet"
        + (f"; this adds the inbound rule: aws {rule}" if rule else ""),
    )

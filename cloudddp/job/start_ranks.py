"""Starting the ranks of a job: the agents of all nodes connect to each other before a rank runs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from cloudddp import timings
from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.gang import Gang, Unreachable
from cloudddp.agent.protocol.phases import Peer
from cloudddp.agent.protocol.sharing import SnapshotSearch, matches
from cloudddp.agent.protocol.start import (
    MAX_LEFT,
    Deadline,
    NodeEnd,
    OnStall,
    StartReply,
    StartRequest,
    Watch,
    Work,
)
from cloudddp.cluster.connect import PROJECT
from cloudddp.cluster.model import Cluster
from cloudddp.config import timing
from cloudddp.config.spec import Config, JobSpec
from cloudddp.errors import NodeError
from cloudddp.formats import format_time
from cloudddp.job.job_request import NewJob
from cloudddp.job.launch_record import s3_destination_of
from cloudddp.job.ranks import LaunchNode, NodePlan
from cloudddp.text import node_list, one_line

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
    config: Config,
    nodes: Sequence[LaunchNode],
    plans: Sequence[NodePlan],
    job: NewJob,
    files: Iterable[str] = (),
) -> None:
    """Start the ranks on every node, and note the replies. `files` are those of the project. Raises
    NodeError; then ranks may run on some nodes."""
    gang = _gang(cluster, nodes, config)
    wrote = any(one.probe.wrote for one in nodes)
    versions = {one.rank: one.version for one in nodes}
    images = {one.rank: one.container for one in nodes}
    search = snapshot_search(config.job, files, nodes=len(plans), wrote=wrote)
    watch, end = _watch(cluster, config.job), _end(cluster, config, job)
    requests = {
        plan.node: StartRequest(
            job=job.id,
            node=plan.node,
            project=PROJECT,
            gang=gang,
            work=Work(
                script=job.script.shown,
                env=plan.env,
                processes=plan.processes,
                ranks=plan.ranks,
                max_restarts=config.job.max_restarts,
                stop_grace=config.job.stop_grace,
                log_mb=config.job.log_mb,
                paths=config.data_paths,
                container=images.get(plan.node),
            ),
            watch=watch,
            end=end,
            resumed_from=job.resumed_from,
            snapshots=search,
            version=versions[plan.node],
        )
        for plan in plans
    }
    replies = client.call_all(runner, requests)
    _record_laps(replies)
    unreachable = {node: reply.unreachable for node, reply in replies.items() if reply.unreachable}
    if unreachable:
        raise _not_connected(unreachable, gang, cluster)
    for one in nodes:
        one.start_reply = replies[one.rank]


def snapshot_search(job: JobSpec, files: Iterable[str], *, nodes: int, wrote: bool) -> SnapshotSearch | None:
    """Return the search for the files that the nodes share and that are not `files` of the project, which the
    agents copy between them before ranks start (share/spread.py there); None where they share none. A pattern
    of job.share that matches a folder is for all in it. `wrote`: an earlier job wrote something. Pure."""
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
    """Record the parts of the start that the agents have reported, as spans."""
    now = time.monotonic()
    for node, reply in replies.items():
        at = {part: now - seconds for part, seconds in reply.reached.items()}
        for name, (begin, end) in _LAPS.items():
            if begin in at and end in at:
                timings.add(f"  on the node: {name}", at[begin], at[end], node)


def _watch(cluster: Cluster, job: JobSpec) -> Watch:
    limits = timing.current()
    return Watch(
        retries=job.retries,
        stall_minutes=job.stall_minutes,
        on_stall=OnStall(job.on_stall),
        alone_seconds=limits.alone,
        straggler_seconds=limits.straggler,
        notify=job.notify_target,
        usd_hour=cluster.hour or 0.0,
    )


def _end(cluster: Cluster, config: Config, job: NewJob) -> NodeEnd:
    minute = timing.current().minute
    return NodeEnd(
        save=config.job.save_minutes * minute,
        deadline=_deadline(cluster),
        poweroff=None if job.poweroff is None else job.poweroff * minute,
        keep=job.keep * minute,
        results=s3_destination_of(config, job.id),
    )


def _deadline(cluster: Cluster) -> Deadline | None:
    """Return the cluster's deadline by a duration: the clock of a node may be wrong."""
    if cluster.expires is None:
        return None
    left = (cluster.expires - datetime.now(UTC)).total_seconds()
    # Without any left the tag is wrong: the nodes run.
    return Deadline(min(left, MAX_LEFT), format_time(cluster.expires)) if left > 0 else None


def _gang(cluster: Cluster, nodes: Sequence[LaunchNode], config: Config) -> Gang:
    peers = [
        Peer(node.rank, node.address, node.probe.agent_port, cluster.nodes[node.rank].id) for node in nodes
    ]
    return Gang(
        tuple(peers),
        secrets.token_hex(32),
        silence=config.job.heartbeat,
        join=timing.current().join,
        preflight=config.job.preflight,
    )


def _not_connected(found: Mapping[int, Unreachable], gang: Gang, cluster: Cluster) -> NodeError:
    """Return the error for nodes whose agents could not connect to each other: no rank was started."""
    again = "repeat `cloudddp launch`"
    for node, one in found.items():
        if one.error:
            return NodeError(f"node {node}: {one_line(one.error)}", hint=again)
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
        return NodeError(f"not all nodes were ready in time; {node_list(found)} gave up", hint=again)
    listed = "; ".join(
        f"node {node} cannot connect to node {other} ({ports.get(other, 'unknown')}): {one_line(reason)}"
        for (node, other), reason in sorted(pairs.items())[:_LISTED_PAIRS]
    )
    more = f"; and {len(pairs) - _LISTED_PAIRS} more" if len(pairs) > _LISTED_PAIRS else ""
    groups, rule = sorted({group for node in cluster.nodes.values() for group in node.groups}), ""
    if groups:
        rule = (
            f"; this adds the inbound rule: aws ec2 authorize-security-group-ingress --region "
            f"{cluster.region} --group-id {groups[0]} --ip-permissions "
            f"'IpProtocol=-1,UserIdGroupPairs=[{{GroupId={groups[0]}}}]'"
        )
    return NodeError(
        f"{listed}{more}",
        hint="the ranks need every port between the nodes: check the rules of the cluster's security group "
        f"(inbound and outbound, all traffic within the group) and the network ACLs of its subnet{rule}",
    )

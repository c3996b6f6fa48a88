"""Replaces the nodes that a cluster has lost, by `up`'s own path; the nodes that are left stay, whatever
happens.

Each replacement has the rank of the node that it replaces in its tags, from the call that creates it on, so
that a command that finds it later knows what it is. If this is interrupted or fails, exactly the new nodes
are removed again; if it is killed, the next call makes what it finds ready.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from cloudddp import signals
from cloudddp.aws import inventory, removal
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance
from cloudddp.cluster import created_ids, host_keys, lookup, node_addresses, nodes_end
from cloudddp.cluster.connect import dial, remembered
from cloudddp.cluster.create import CreatedResources
from cloudddp.cluster.launch_errors import Next, NotLaunched, attempt, next_step
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.nodes_end import deadline as deadline_of
from cloudddp.cluster.plan import plan_replacement
from cloudddp.cluster.requests import is_spot, on_demand
from cloudddp.cluster.user_data import Identity, plan_command
from cloudddp.cluster.wait_ready import check_intact, make_ready, wait_running
from cloudddp.config import timing
from cloudddp.config.spec import ClusterSpec, seconds_of
from cloudddp.errors import AWSError, CloudDDPError, Interrupted, Leftovers, ProgressCallback
from cloudddp.formats import moment
from cloudddp.local_state import USUAL_USER, ClusterFolder
from cloudddp.ssh.target import generate_key, public_key_of

_ROUNDS = 3  # in which further nodes may be lost
_MAX_RECORD = 1 << 20  # bytes of the record of a launch
_STILL_REMOVING = "still removing the new nodes; this takes a moment"


@dataclass(slots=True)
class _New:
    """The nodes that this command has launched, or found: an earlier one was killed before they were
    ready."""

    attempts: list[CreatedResources] = field(default_factory=list)
    found: list[str] = field(default_factory=list)

    @property
    def known(self) -> created_ids.Known:
        return created_ids.combined(attempt.known for attempt in self.attempts)

    @property
    def ids(self) -> list[str]:
        return [*self.found, *self.known.instances]

    @property
    def tokens(self) -> set[str]:
        return {one.request.params["ClientToken"] for attempt in self.attempts for one in attempt.launches}


def replace_lost(aws: AWS, cluster: Cluster, spec: ClusterSpec, progress: ProgressCallback) -> Cluster:
    """Launch a node for each one that the cluster has lost, and return the cluster when all its nodes are
    ready.

    Raises NotLaunched if the zone has no capacity within spec.wait_capacity, CloudDDPError, Interrupted,
    Leftovers; then the new nodes have been removed.
    """
    folder = ClusterFolder(cluster.id)
    spec = msgspec.structs.replace(remembered(spec, folder.record()), instance_type=cluster.type)
    _wait_until_listed(folder, progress)
    cluster = lookup.refresh(aws, cluster.name, cluster.id) or cluster
    unready = _unready(folder, cluster)
    if unready and folder.read(folder.host_key) is None:  # which another command has deleted
        terminate(aws, cluster, sorted(unready), progress)
        return replace_lost(aws, cluster, spec, progress)
    if not cluster.missing and not unready:
        return cluster
    new = _New()
    try:
        if unready:
            progress(f"node {', '.join(map(str, unready))} was launched by a command that was killed")
            new.found += [node.id for node in unready.values()]
            unrecorded = [one for one in new.found if one not in folder.created_instances()]
            if unrecorded:
                folder.journal_created(unrecorded)
            _make_ready(aws, cluster, spec, new.found, progress)
        whole = cluster
        for _ in range(_ROUNDS):
            if not whole.missing:
                break
            _launch(aws, whole, spec, folder, new, progress)
            _make_ready(aws, whole, spec, new.ids, progress)
            # Another node may have been lost while this one was awaited.
            found = lookup.refresh(aws, whole.name, whole.id)
            if found is None:
                raise CloudDDPError(
                    f"every node of cluster {cluster.name!r} has ended",
                    hint="`cloudddp up` creates a new one",
                )
            whole = found
        check_intact(aws, whole)
        if whole.missing:
            raise CloudDDPError(
                f"nodes of cluster {cluster.name!r} keep ending: {len(whole.nodes)} left",
                hint="`cloudddp status` shows why",
            )
        folder.journal(created_ids.READY, nodes={rank: node.id for rank, node in whole.nodes.items()})
    except BaseException as error:
        _remove(aws, cluster, new, error, progress)
        raise
    host_keys.delete_shared_key(folder)  # if it is not reached, the next command that connects does it
    return whole


def terminate(aws: AWS, cluster: Cluster, ranks: Sequence[int], progress: ProgressCallback) -> None:
    """Terminate nodes that are to be replaced, and verify it. Raises CloudDDPError if one does not
    terminate."""
    ids = [cluster.nodes[rank].id for rank in ranks if rank in cluster.nodes]
    if not ids:
        return
    progress(f"terminating {', '.join(ids)}")
    ClusterFolder(cluster.id).journal("terminate", ids=ids)
    left = _terminate(aws, cluster, ids)
    if left:
        raise CloudDDPError(
            f"{', '.join(one.id for one in left)} did not terminate", hint="repeat the command"
        )


def missing_ranks(cluster: Cluster) -> list[int]:
    """Return the ranks of the nodes that a cluster has lost."""
    count = len(cluster.nodes) + cluster.missing
    return [rank for rank in range(count) if rank not in cluster.nodes]


def _wait_until_listed(folder: ClusterFolder, progress: ProgressCallback) -> None:
    """Wait until AWS lists what a command that was killed may have launched: a second node of a rank would be
    billed and useless."""
    before = created_ids.from_journal(folder)
    wait = before.listed_from - time.monotonic()
    if not before.nothing and wait > 0:
        progress(f"waiting {wait:.0f} s until AWS lists everything that an earlier command has launched")
        time.sleep(wait)


def _unready(folder: ClusterFolder, cluster: Cluster) -> dict[int, Instance]:
    """Return the nodes that this computer has launched as replacements, and that were never ready."""
    events = folder.events()
    ready: set[str] = set()
    tokens: set[str] = set()
    for event in events:
        nodes, token = event.get("nodes"), event.get("client_token")
        if event.get("event") == created_ids.READY and isinstance(nodes, dict):
            ready.update(one for one in nodes.values() if isinstance(one, str))
        if event.get("method") == created_ids.RUN and isinstance(token, str):
            tokens.add(token)
    return {
        rank: node
        for rank, node in cluster.nodes.items()
        if node.tags.node_rank is not None and node.id not in ready and node.client_token in tokens
    }


def _commands(cluster: Cluster, spec: ClusterSpec, user: str) -> list[list[str]]:
    """Return what lets a replacement end with the other nodes if no job starts on it. It waits, unused, while
    there is no capacity for another one."""
    if (plan := nodes_end.planned(cluster.id)) is None:
        return []
    seconds = plan.minutes * timing.current().minute + seconds_of(spec.wait_capacity)
    return [plan_command(user, plan.job, seconds)]


def _launch(
    aws: AWS,
    cluster: Cluster,
    spec: ClusterSpec,
    folder: ClusterFolder,
    new: _New,
    progress: ProgressCallback,
) -> None:
    """Launch a node for each missing rank, on demand where the settings allow it and there is no spot
    capacity. Raises NotLaunched if there is no capacity within spec.wait_capacity."""
    launch = recorded = _recorded_launch(folder)
    zone = next(iter(cluster.nodes.values())).zone
    record = folder.record()
    either_market = is_spot(recorded) and "prefer" in (spec.spot, record.spot if record else "")
    expires = deadline_of(cluster)
    if expires is None:
        raise CloudDDPError(
            "the deadline of the cluster is unknown", hint="`cloudddp down` and `cloudddp up`"
        )
    identity = _identity(folder)
    deadline = time.monotonic() + seconds_of(spec.wait_capacity)
    pause = timing.current().capacity_first
    waiting = missing_ranks(cluster)
    number = 1 + sum(event.get("method") == created_ids.RUN for event in folder.events())
    while waiting:
        now = datetime.now(UTC).replace(microsecond=0)
        planned = plan_replacement(
            launch,
            identity,
            rank=waiting[0],
            zone=zone,
            attempt=number,
            now=now,
            expires=expires,
            idle_minutes=cluster.idle_minutes,
            ssh_port=spec.ssh_port,
            commands=_commands(cluster, spec, spec.user or (record.user if record else USUAL_USER)),
        )
        number += 1
        progress(f"launching node {waiting[0]}: {launch['InstanceType']} in {zone}, until {moment(expires)}")
        try:
            new.attempts.append(CreatedResources(aws, cluster.name, folder, progress, [planned]))
            new.attempts[-1].create()
            waiting.pop(0)
        except NotLaunched as failure:
            if either_market and launch is recorded:
                progress(
                    f"no spot instance in {zone} ({failure.attempts[-1].reason}); launching an on-demand one"
                )
                launch = on_demand(recorded)
                continue
            left = deadline - time.monotonic()
            if left <= 0 or not any(one.waiting_helps for one in failure.attempts):
                raise
            progress(f"no capacity in {zone}: next attempt in {min(pause, left):.0f} s (Ctrl-C ends)")
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, timing.current().capacity_longest)
            launch = recorded


def _recorded_launch(folder: ClusterFolder) -> dict[str, Any]:
    """Return the parameters with which `up` launched the nodes, as create.py recorded them. Raises
    CloudDDPError without a record on this computer, or for one that is damaged."""
    try:
        text = folder.read(folder.launch)
        found = json.loads(text) if text is not None and len(text) <= _MAX_RECORD else None
    except (ValueError, RecursionError):
        found = None
    kinds = {"ImageId": str, "InstanceType": str, "TagSpecifications": list, "NetworkInterfaces": list}
    if not isinstance(found, dict) or not all(
        isinstance(found.get(key), kind) for key, kind in kinds.items()
    ):
        raise CloudDDPError(
            f"this computer has no record of how the nodes of cluster {folder.id} were launched, so it "
            "cannot replace one",
            hint="`cloudddp pull` what you need, then `cloudddp down` and `cloudddp up`",
        )
    return found


def _identity(folder: ClusterFolder) -> Identity:
    """Return the identity of new nodes: they boot with a host key of their own, which is recorded as the
    shared one.

    Every other node has had its own key since it was ready.
    """
    host = generate_key()
    folder.write(folder.host_key, f"{host.public}\n")
    login = public_key_of(folder.login_key_text())
    return Identity(folder.id, login, host.private, host.public)


def _make_ready(
    aws: AWS, cluster: Cluster, spec: ClusterSpec, ids: Sequence[str], progress: ProgressCallback
) -> None:
    """Wait until the new nodes run, and check them as `up` does."""
    alone = msgspec.structs.replace(spec, nodes=len(ids))
    only = frozenset(ids)
    try:
        found = wait_running(aws, alone, cluster.id, cluster.gpus, progress, addressed=False, only=only)
        if node_addresses.missing(aws, found):
            node_addresses.associate(aws, found, progress)
        found = wait_running(aws, alone, cluster.id, cluster.gpus, progress, only=only)
    except AWSError as error:
        if next_step(error.code) is not Next.ZONE:
            raise
        zone = next(iter(cluster.nodes.values())).zone
        raise NotLaunched([attempt(aws.region, zone, error)], error, accepted=True) from None
    make_ready(aws, found, alone, progress, dial)


def _remove(aws: AWS, cluster: Cluster, new: _New, error: BaseException, progress: ProgressCallback) -> None:
    """Remove exactly the new nodes, and verify it. Raises Leftovers, or Interrupted after Ctrl-C."""
    interrupted = isinstance(error, KeyboardInterrupt)
    with signals.protected(lambda: progress(_STILL_REMOVING)):
        if new.ids or new.known.uncertain:
            progress(f"{'interrupted' if interrupted else 'failed'}: removing the new nodes")
            _remove_new(aws, cluster, new)
    if interrupted:
        raise Interrupted(
            "interrupted; the new nodes were removed, and the others of the cluster were not changed",
            hint="`cloudddp resume` tries again, `cloudddp down` stops the bill",
        ) from None


def _remove_new(aws: AWS, cluster: Cluster, new: _New) -> None:
    ids = new.ids
    try:
        if new.known.uncertain:  # AWS may have launched a node without confirming it
            time.sleep(max(new.known.listed_from - time.monotonic(), 0.0))
            listed = inventory.instances(aws, inventory.with_id(cluster.id))
            ids += [
                one.id for one in listed if one.live and one.client_token in new.tokens and one.id not in ids
            ]
        if ids:
            ClusterFolder(cluster.id).journal("terminate", ids=ids)
        left = [one.id for one in _terminate(aws, cluster, ids)] if ids else []
        why = "did not terminate"
    except Exception as problem:  # a bug, too, must not hide that nodes may be running
        left, why = ids or ["new nodes"], f"may still be running: {problem}"
    if left:
        raise Leftovers(
            f"{', '.join(left)} {why}",
            hint="repeat `cloudddp resume`, or remove the cluster: `cloudddp down`",
        )


def _terminate(aws: AWS, cluster: Cluster, ids: Sequence[str]) -> list[Instance]:
    """Terminate instances; return those that remain."""
    removal.terminate(aws, list(ids))
    return removal.wait_terminated(
        aws, lambda: [one for one in inventory.instances(aws, inventory.with_id(cluster.id)) if one.id in ids]
    )

"""Replaces the nodes that a cluster has lost, by `up`'s own path; the nodes that are left stay, whatever
happens.

Each replacement has the rank of the node that it replaces in its tags, from the call that creates it on, so
that a command that finds it later knows what it is. If this is interrupted or fails, exactly the new nodes
are removed again; if it is killed, the next call makes what it finds ready.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from cloudddp import signals
from cloudddp.aws import inventory, removal
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance
from cloudddp.cluster import created_ids, lookup, nodes_end
from cloudddp.cluster.connect import dial, remembered
from cloudddp.cluster.create import CreatedResources
from cloudddp.cluster.created_ids import KnownIds
from cloudddp.cluster.launch_errors import NotLaunched
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.plan import plan_replacement, require_time
from cloudddp.cluster.requests import is_spot, on_demand
from cloudddp.cluster.user_data import Identity, plan_command, user_data
from cloudddp.cluster.wait_ready import check_intact, make_ready, wait_running
from cloudddp.config import timing
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.config.values import seconds_of
from cloudddp.errors import CloudDDPError, Interrupted, Leftovers, ProgressCallback
from cloudddp.formats import format_time
from cloudddp.local_state import USUAL_USER, ClusterFolder
from cloudddp.ssh.target import generate_key, public_key_of

_ROUNDS = 3  # in which further nodes may be lost
_MAX_RECORD = 1 << 20  # bytes of the record of a launch
_RECORDED = {"ImageId": str, "InstanceType": str, "TagSpecifications": list, "NetworkInterfaces": list}


def replace_lost(aws: AWS, cluster: Cluster, spec: ClusterSpec, progress: ProgressCallback) -> Cluster:
    """Launch a node for each one that the cluster has lost, and return the cluster when all its nodes are
    ready.

    Raises NotLaunched if the zone has no capacity within spec.wait_capacity, CloudDDPError, Interrupted,
    Leftovers; then the new nodes have been removed.
    """
    folder = ClusterFolder(cluster.id)
    spec = replace(remembered(spec, folder.record()), instance_type=cluster.type)
    before = created_ids.from_journal(folder)
    wait = before.listed_from - time.monotonic()
    if not before.nothing and wait > 0:  # a second node of a rank would be billed and useless
        progress(f"waiting {wait:.0f} s until AWS lists everything that an earlier command has launched")
        time.sleep(wait)
    cluster = lookup.refresh(aws, cluster.name, cluster.id) or cluster
    unready = _unready(folder, cluster)
    if unready and folder.read(folder.host_key) is None:  # which another command has deleted
        terminate(aws, cluster, sorted(unready), progress)
        return replace_lost(aws, cluster, spec, progress)
    if not cluster.missing and not unready:
        return cluster
    work = _Replacement(aws, cluster, spec, folder, progress)
    try:
        whole = work.run(unready)
    except BaseException as error:
        work.remove(interrupted=isinstance(error, KeyboardInterrupt))
        raise
    # Every node has its own host key. If this is not reached, the next command that connects does it.
    folder.host_key.unlink(missing_ok=True)
    return whole


def terminate(aws: AWS, cluster: Cluster, ranks: Sequence[int], progress: ProgressCallback) -> None:
    """Terminate nodes that are to be replaced, and verify it. Raises CloudDDPError."""
    ids = [cluster.nodes[rank].id for rank in ranks if rank in cluster.nodes]
    if not ids:
        return
    progress(f"terminating {', '.join(ids)}")
    if left := _terminate(aws, cluster, ids):
        raise CloudDDPError(f"{', '.join(left)} did not terminate", hint="repeat the command")


def _terminate(aws: AWS, cluster: Cluster, ids: list[str]) -> list[str]:
    """Terminate instances; return those that remain."""
    if not ids:
        return []
    ClusterFolder(cluster.id).journal("terminate", ids=ids)
    removal.terminate(aws, ids)
    listed = inventory.with_id(cluster.id)
    left = removal.wait_terminated(
        aws, lambda: [instance for instance in inventory.instances(aws, listed) if instance.id in ids]
    )
    return [one.id for one in left]


def missing_ranks(cluster: Cluster) -> list[int]:
    """Return the ranks of the nodes that a cluster has lost."""
    count = len(cluster.nodes) + cluster.missing
    return [rank for rank in range(count) if rank not in cluster.nodes]


def _unready(folder: ClusterFolder, cluster: Cluster) -> dict[int, Instance]:
    """Return the nodes that this computer has launched as replacements, and that were never ready."""
    ready: set[object] = set()
    tokens: set[object] = set()
    for event in folder.events():
        nodes = event.get("nodes")
        if event.get("event") == created_ids.READY and isinstance(nodes, dict):
            ready.update(map(str, nodes.values()))
        if event.get("method") == created_ids.RUN:
            tokens.add(str(event.get("client_token")))
    return {
        rank: node
        for rank, node in cluster.nodes.items()
        if node.tags.node_rank is not None and node.id not in ready and node.client_token in tokens
    }


@dataclass(slots=True)
class _Replacement:
    """The nodes that this command launches, or has found: a killed one left them."""

    aws: AWS
    cluster: Cluster
    spec: ClusterSpec
    folder: ClusterFolder
    progress: ProgressCallback
    attempts: list[CreatedResources] = field(default_factory=list)
    found: list[str] = field(default_factory=list)

    @property
    def known(self) -> KnownIds:
        return created_ids.combined(attempt.ids.known for attempt in self.attempts)

    def run(self, unready: dict[int, Instance]) -> Cluster:
        """Return the cluster when it has all its nodes."""
        if unready:
            shown = ", ".join(map(str, unready))
            self.progress(f"node {shown} was launched by a command that was killed")
            self.found = [node.id for node in unready.values()]
            if unrecorded := [one for one in self.found if one not in self.folder.created_instances()]:
                self.folder.journal_created(unrecorded)
            self._make_ready()
        whole = self.cluster
        for _ in range(_ROUNDS):
            if not whole.nodes:
                raise CloudDDPError(
                    f"every node of cluster {whole.name!r} has ended",
                    hint="`cloudddp up` creates a new one",
                )
            if not whole.missing:
                break
            self._launch(whole)
            self._make_ready()
            # Another node may have been lost while this one was awaited.
            whole = lookup.refresh(self.aws, whole.name, whole.id) or whole.only(())
        check_intact(self.aws, whole)
        if whole.missing:
            raise CloudDDPError(
                f"nodes of cluster {whole.name!r} keep ending: {len(whole.nodes)} left",
                hint="`cloudddp status` shows why",
            )
        self.folder.journal(created_ids.READY, nodes={rank: node.id for rank, node in whole.nodes.items()})
        return whole

    def _launch(self, cluster: Cluster) -> None:
        """Launch a node for each missing rank, on demand where the settings allow it and there is no spot
        capacity. Raises NotLaunched if there is no capacity within spec.wait_capacity."""
        launch = recorded = _recorded_launch(self.folder)
        zone = next(iter(cluster.nodes.values())).zone
        record, limits, expires = self.folder.record(), timing.current(), nodes_end.deadline(cluster)
        either_market = is_spot(recorded) and "prefer" in (self.spec.spot, record.spot if record else "")
        if expires is None:
            raise CloudDDPError(
                "the deadline of the cluster is unknown", hint="`cloudddp down` and `cloudddp up`"
            )
        identity = _identity(self.folder)
        wait = seconds_of(self.spec.wait_capacity)
        deadline, pause = time.monotonic() + wait, limits.capacity_first
        commands = []
        if (plan := nodes_end.planned(cluster.id)) is not None:
            # It ends with the other nodes if no job starts on it. It waits, unused, while there is no
            # capacity for another one.
            user = self.spec.user or (record.user if record else USUAL_USER)
            commands = [plan_command(user, plan.job, plan.minutes * limits.minute + wait)]
        waiting = missing_ranks(cluster)
        number = sum(event.get("method") == created_ids.RUN for event in self.folder.events())
        while waiting:
            now = datetime.now(UTC).replace(microsecond=0)
            require_time(expires, now)
            number += 1
            data = user_data(identity, now, expires, cluster.idle_minutes, self.spec.ssh_port, commands)
            planned = plan_replacement(launch, cluster.id, data, waiting[0], zone, number, expires)
            self.progress(
                f"launching node {waiting[0]}: {launch['InstanceType']} in {zone}, "
                f"until {format_time(expires)}"
            )
            try:
                self.attempts.append(
                    CreatedResources(self.aws, cluster.name, self.folder, self.progress, [planned])
                )
                self.attempts[-1].create()
                waiting.pop(0)
            except NotLaunched as failure:
                last = failure.attempts[-1]
                if either_market and launch is recorded:
                    self.progress(f"no spot instance in {zone} ({last.reason}); launching an on-demand one")
                    launch = on_demand(recorded)
                    continue
                left = deadline - time.monotonic()
                if left <= 0 or not last.waiting_helps:
                    raise
                self.progress(
                    f"no capacity in {zone}: next attempt in {min(pause, left):.0f} s (Ctrl-C ends)"
                )
                time.sleep(min(pause, left))
                pause = min(pause * 1.5, limits.capacity_longest)
                launch = recorded

    def _make_ready(self) -> None:
        """Wait until the new nodes run, and check them as `up` does."""
        only = frozenset([*self.found, *self.known.instances])
        alone = replace(self.spec, nodes=len(only))
        found = wait_running(self.aws, alone, self.cluster.id, self.progress, only=only)
        make_ready(self.aws, found, alone, self.progress, dial)

    def remove(self, *, interrupted: bool) -> None:
        """Remove exactly the new nodes, and verify it. Raises Leftovers, or Interrupted after Ctrl-C."""
        known = self.known
        with signals.protected(lambda: self.progress("still removing the new nodes; this takes a moment")):
            if self.found or not known.nothing:
                self.progress(f"{'interrupted' if interrupted else 'failed'}: removing the new nodes")
                self._remove([*self.found, *known.instances], known)
        if interrupted:
            raise Interrupted(
                "interrupted; the new nodes were removed, and the others of the cluster were not changed",
                hint="`cloudddp resume` tries again, `cloudddp down` stops the bill",
            ) from None

    def _remove(self, ids: list[str], known: KnownIds) -> None:
        try:
            if known.uncertain:  # AWS may have launched a node without confirming it
                time.sleep(max(known.listed_from - time.monotonic(), 0.0))
                sent = [launch.request.params for attempt in self.attempts for launch in attempt.launches]
                tokens = {params["ClientToken"] for params in sent}
                listed = inventory.instances(self.aws, inventory.with_id(self.cluster.id))
                ids += [one.id for one in listed if one.live and one.client_token in tokens]
            left = _terminate(self.aws, self.cluster, list(dict.fromkeys(ids)))
            why = "did not terminate"
        except Exception as problem:  # a bug, too, must not hide that nodes may be running
            left, why = ids or ["new nodes"], f"may still be running: {problem}"
        if left:
            raise Leftovers(
                f"{', '.join(left)} {why}",
                hint="repeat `cloudddp resume`, or remove the cluster: `cloudddp down`",
            )


def _recorded_launch(folder: ClusterFolder) -> dict[str, Any]:
    """Return the parameters with which `up` launched the nodes, as create.py recorded them. Raises
    CloudDDPError without a record on this computer, or for one that is damaged."""
    found: dict[str, Any] = {}
    with contextlib.suppress(ValueError, RecursionError):  # msgspec's errors are ValueErrors
        if len(text := folder.read(folder.launch) or "") <= _MAX_RECORD:
            found = msgspec.json.decode(text, type=dict[str, Any])
    if not all(isinstance(found.get(key), kind) for key, kind in _RECORDED.items()):
        raise CloudDDPError(
            f"this computer has no record of how the nodes of cluster {folder.id} were launched, so it "
            "cannot replace one",
            hint="`cloudddp pull` what you need, then `cloudddp down` and `cloudddp up`",
        )
    return found


def _identity(folder: ClusterFolder) -> Identity:
    """Return the identity of new nodes: they boot with a host key of their own, which is recorded as the
    shared one, since every other node has had its own key since it was ready."""
    host = generate_key()
    folder.write(folder.host_key, f"{host.public}\n")
    login = public_key_of(folder.login_key_text())
    return Identity(folder.id, login, host.private, host.public)

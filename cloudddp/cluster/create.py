"""Sends the requests of a plan, and records what they created.

Each step is written to the journal before its call. The answers of AWS are kept in addition to what is
found by tag, since new resources may not be found by tag for a while.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cloudddp import signals
from cloudddp.aws import inventory, reservations
from cloudddp.aws.answers import THROTTLED
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Resource
from cloudddp.cluster import created_ids, name_lock, node_addresses
from cloudddp.cluster.created_ids import CreatedIds
from cloudddp.cluster.launch_errors import LaunchAttempt, Next, NotLaunched, next_step
from cloudddp.cluster.name_lock import NameTaken
from cloudddp.cluster.plan import Launch
from cloudddp.cluster.preconditions import check_state
from cloudddp.cluster.requests import PLACEMENT_STEP, Ref, Request
from cloudddp.cluster.teardown import down, leftovers
from cloudddp.config import timing
from cloudddp.errors import AWSError, ProgressCallback, ignore_progress
from cloudddp.formats import plural
from cloudddp.local_state import ClusterFolder
from cloudddp.tags import TAG_NODE_RANK

_NOT_FOUND_YET = (
    "InvalidGroup.NotFound",
    "InvalidSecurityGroupID.NotFound",  # RunInstances, for a group that is given by its id
    "InvalidKeyPair.NotFound",
    "InvalidInstanceID.NotFound",
    "InvalidPlacementGroup.Unknown",
)
_RETRY_SECONDS = 0.5
_SHOWN = {"key-pair": "key pair", "security-group": "security group", PLACEMENT_STEP: "placement group"}
_NOT_RECORDED = ("UserData", "ClientToken")
# Errors of a launch that end by themselves, and what is shown meanwhile.
_REPEATED = {
    reservations.EXCEEDED: "the capacity reservation is full; trying again for up to 10 minutes, since AWS "
    "may still be cleaning up after instances that have ended",
    **dict.fromkeys(THROTTLED, "AWS throttles launches of this account; trying again"),
}
_CLEAN_UP_POLLS = 60  # in the time that a capacity reservation gets to clean up: every 10 s


@dataclass(eq=False)
class CreatedResources:
    """What one `up` has created, as far as known. There are no `requests` for a node that is launched for a
    lost one.

    `holds_name`: the key pair exists, and with it the lock on the name. `launched`: time.monotonic() when AWS
    accepted the launch, `zone` where.
    """

    aws: AWS
    name: str
    folder: ClusterFolder
    progress: ProgressCallback
    launches: Sequence[Launch]
    requests: Sequence[Request] = ()
    holds_name: bool = False
    launched: float | None = None
    zone: str = ""
    ids: CreatedIds = field(default_factory=CreatedIds)

    def create(self) -> None:
        """Send the requests, and launch the nodes in the first zone that has capacity.

        Raises NameTaken, NotLaunched if no zone has, AWSError, CloudDDPError.
        """
        answers: dict[str, Any] = {}
        allocations = [one for one in self.requests if one.step.startswith(node_addresses.STEP)]
        for request in self.requests:
            if request in allocations:
                continue
            self._record(request)
            if request.step in _SHOWN:
                self.progress(f"creating the {_SHOWN[request.step]}")
            if request.step == "key-pair":
                self._lock_name(request)
            else:
                with signals.deferred(self._on_signal):
                    resolved = replace(request, params=_resolved(request.params, answers))
                    answers[request.step] = self._call(resolved)
        if allocations:
            self._allocate(allocations)
        self._launch(answers)

    def _allocate(self, requests: Sequence[Request]) -> None:
        """Allocate the Elastic IPs, several at a time: EC2 has no call for more than one.

        Raises NotLaunched if the region has no more: another one may.
        """
        self.progress(f"allocating {plural(len(requests), 'Elastic IP')}")
        for request in requests:
            self._record(request)
        with signals.deferred(self._on_signal):
            try:
                node_addresses.in_parallel([functools.partial(self._send, one) for one in requests])
            except AWSError as error:
                explained = node_addresses.explained(error)
                if next_step(error.code) is not Next.REGION:
                    raise explained from None
                raise NotLaunched(LaunchAttempt(self.aws.region, "", explained)) from None

    def _record(self, request: Request) -> None:
        token = request.params.get("ClientToken")
        self.folder.journal(request.step, method=request.method, client_token=token)

    def _launch(self, answers: Mapping[str, Any]) -> None:
        attempts: list[LaunchAttempt] = []
        for launch in self.launches:
            self.folder.check_present()  # before nodes are billed that nothing could log in to
            self._record(launch.request)
            if self.requests:
                self.progress(f"creating the nodes in {launch.zone}")
            try:
                self._run_instances(launch.request, answers)
            except AWSError as error:
                step = next_step(error.code)
                if step is Next.STOP:
                    raise
                attempts.append(LaunchAttempt(self.aws.region, launch.zone, error))
                if step is Next.REGION:
                    break
            else:
                self.zone = launch.zone
                return
        raise NotLaunched(*attempts)

    def _on_signal(self) -> None:
        what = "everything" if self.requests else "the new node"
        self.progress(f"finishing the call in flight, then removing {what}")

    def _lock_name(self, request: Request) -> None:
        """Create the key pair. Raises NameTaken if another cluster has the name.

        The remains of an `up` that was killed on this computer are removed first.
        """
        deadline = time.monotonic() + timing.current().settle
        while True:
            with signals.deferred(self._on_signal):
                try:
                    self._send(request)
                    self.holds_name = True
                    return
                except AWSError as error:
                    if error.code != name_lock.DUPLICATE:
                        raise
            holder = name_lock.holder(self.aws, self.name)
            if holder is not None and holder.tags.cluster_id == self.folder.id:
                self.holds_name = True  # botocore has repeated a call whose answer was lost
                self.ids.resources.append(holder)
                return
            if holder is not None:
                self._remove_abandoned(holder)
            elif time.monotonic() > deadline:
                # EC2 refuses the name, and does not list the key pair that has it.
                raise NameTaken(
                    f"the name {self.name!r} is taken in {self.aws.region}, by a key pair that AWS does "
                    "not list yet; nothing was created",
                    hint="repeat `cloudddp up`, or choose another name with -c",
                )
            time.sleep(_RETRY_SECONDS)

    def _remove_abandoned(self, holder: Resource) -> None:
        if not name_lock.abandoned(self.aws, holder):
            raise name_lock.taken(self.aws, self.name, holder)
        cluster_id = holder.tags.cluster_id
        self.progress(f"removing the remains of cluster {cluster_id}, which had this name")
        kept = created_ids.from_journal(ClusterFolder(cluster_id))
        report = down(self.aws, inventory.with_id(cluster_id), known=kept, progress=ignore_progress)
        if report.left or report.reasons:
            raise leftovers(report)

    def _run_instances(self, request: Request, answers: Mapping[str, Any]) -> None:
        """Start the nodes. A capacity reservation counts ended instances as available after minutes of
        clean-up, so a full one is tried again, and for a minute a launch that AWS throttles; Ctrl-C ends the
        wait."""
        limits = timing.current()
        target = request.params.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget")
        deadline, reported = 0.0, ""
        while True:
            try:
                self._run_instances_once(request, answers)
                return
            except AWSError as error:
                # Only now: botocore has repeated a throttled call for a while.
                deadline = deadline or time.monotonic() + (limits.clean_up if target else limits.minute)
                if error.code not in _REPEATED or time.monotonic() > deadline:
                    raise
                if error.code != reported:
                    self.progress(_REPEATED[error.code])
                    reported = error.code
            time.sleep(limits.clean_up / _CLEAN_UP_POLLS)
            if target:  # it may have ended
                with contextlib.suppress(AWSError):
                    check_state(reservations.find(self.aws, target["CapacityReservationId"]))

    def _run_instances_once(self, request: Request, answers: Mapping[str, Any]) -> None:
        with signals.deferred(self._on_signal):
            resolved = _resolved(request.params, answers)
            if self.requests:
                # For a node that has to be replaced. The user data contain the private key with which nodes
                # boot.
                kept = {key: value for key, value in resolved.items() if key not in _NOT_RECORDED}
                self.folder.write(self.folder.launch, f"{json.dumps(kept, indent=1)}\n")
            answer = self._call(replace(request, params=resolved))
            self.launched = time.monotonic()
            self.folder.journal_created(self.ids.instances)
            numbers = sorted(int(item.get("AmiLaunchIndex") or 0) for item in answer["Instances"])
            if numbers == list(range(len(numbers))):
                return
            # EC2 has not numbered the nodes, which it documents for other ways to launch.
            for rank, item in enumerate(answer["Instances"]):
                tags = [{"Key": TAG_NODE_RANK, "Value": str(rank)}]
                self._call(Request("rank", "create_tags", {"Resources": [item["InstanceId"]], "Tags": tags}))

    def _call(self, request: Request) -> Any:
        """Make a call; repeat it while AWS does not find what it has just created (eventual consistency).

        A Duplicate is our own: the names of the security group and of the placement group contain the
        cluster's id, so botocore has repeated a call whose answer was lost. If the name lock is gone too,
        another command is removing the cluster.
        """
        deadline = time.monotonic() + timing.current().settle
        while True:
            try:
                return self._send(request)
            except AWSError as error:
                if error.code == "InvalidPermission.Duplicate":
                    return {}
                if error.code == "InvalidPlacementGroup.Duplicate":
                    self._keep(request, {})
                    return {}
                if error.code == "InvalidGroup.Duplicate":
                    named = [{"Name": "group-name", "Values": [request.params["GroupName"]]}]
                    if own := inventory.security_groups(self.aws, named):
                        self._keep(request, own[0])
                        return own[0]
                if error.code not in _NOT_FOUND_YET or time.monotonic() > deadline:
                    raise
                if name_lock.lost(self.aws, self.name, self.folder.id):
                    raise
            time.sleep(_RETRY_SECONDS)

    def _send(self, request: Request) -> Any:
        """Make a call once, and keep what it has created. Safe to call from several threads."""
        with self.ids.calling(request):
            answer = self.aws.call("ec2", request.method, **request.params)
        self._keep(request, answer)
        return answer

    def _keep(self, request: Request, answer: Mapping[str, Any]) -> None:
        resource = self.ids.answered(request, answer)
        if resource is not None:
            self.folder.journal(
                created_ids.CREATED,
                step=request.step,
                kind=resource.kind,
                id=resource.id,
                detail=resource.detail,
            )


def _resolved(value: Any, answers: Mapping[str, Any]) -> Any:
    """Return parameters with every Ref replaced by the answer that it names."""
    if isinstance(value, Ref):
        return answers[value.step][value.key]
    if isinstance(value, Mapping):
        return {key: _resolved(item, answers) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, answers) for item in value]
    return value

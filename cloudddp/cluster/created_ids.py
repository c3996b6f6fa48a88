"""What a command knows about a cluster besides what AWS lists by tag: the ids that AWS returned when it
created them.

A filter by tag may omit new resources for some seconds, and a call whose answer was lost may create something
after the client has given up. A removal that relies on tags alone would miss both.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cloudddp.aws.inventory import Resource
from cloudddp.cluster.requests import Request
from cloudddp.config import timing
from cloudddp.errors import AWSError, CloudDDPError, CredentialsError, UsageError
from cloudddp.local_state import ClusterFolder
from cloudddp.tags import Tags, decode
from cloudddp.text import one_line

CREATED = "created"  # the event of the journal for everything that is not an instance
READY = "ready"
# Method -> kind (as in inventory.py), key of the id in the answer, parameter with the name
_CREATING = {
    "import_key_pair": ("key pair", "KeyPairId", "KeyName"),
    "create_security_group": ("security group", "GroupId", "GroupName"),
    "create_placement_group": ("placement group", "GroupId", "GroupName"),
    "allocate_address": ("Elastic IP", "AllocationId", ""),
}
_KINDS = frozenset(kind for kind, _, _ in _CREATING.values())
RUN = "run_instances"
# The error of the last attempt of a call, of which an earlier attempt may have succeeded.
_AMBIGUOUS = (
    "InternalError",
    "InternalFailure",
    "Unavailable",
    "ServiceUnavailable",
    "RequestLimitExceeded",
    "Throttling",
)


@dataclass(frozen=True, slots=True)
class KnownIds:
    """`listed_from`: when AWS lists all of the cluster by tag, as time.monotonic(). `uncertain`: there may be
    more until then, since AWS has not answered a call."""

    instances: tuple[str, ...] = ()
    resources: tuple[Resource, ...] = ()
    listed_from: float = 0.0
    uncertain: bool = False

    @property
    def nothing(self) -> bool:
        """Whether nothing was created, and nothing can appear."""
        return not self.instances and not self.resources and not self.uncertain


def identity(resource: Resource) -> str:
    """Return what a resource is removed by: placement groups by name, all others by id."""
    return resource.detail if resource.kind == "placement group" else resource.id


NOTHING: KnownIds = KnownIds()


class CreatedIds:
    """What the calls of one command have created, and which of them may have created more. It makes no call.

    A call may have had an effect from the moment at which it is sent, until AWS has refused or answered it.
    """

    def __init__(self) -> None:
        self.instances: list[str] = []
        self.resources: list[Resource] = []
        self._unanswered: set[str] = set()  # steps that were sent and whose outcome is unknown
        self._last_answer = time.monotonic()

    @contextlib.contextmanager
    def calling(self, request: Request) -> Iterator[None]:
        """Note that a call is sent in the block, and whether an error that it raises excludes an effect."""
        self._unanswered.add(request.step)
        try:
            yield
        except (AWSError, UsageError) as error:
            if _had_no_effect(request, error):
                self._unanswered.discard(request.step)
            raise
        finally:
            self._last_answer = time.monotonic()

    def answered(self, request: Request, answer: Mapping[str, Any]) -> Resource | None:
        """Keep what a call has created, given AWS's answer; return it, but not instances."""
        retries = int(answer.get("ResponseMetadata", {}).get("RetryAttempts") or 0)
        if not _may_have_repeated(request, retries):
            self._unanswered.discard(request.step)
        if request.method == RUN:
            self.instances = [item["InstanceId"] for item in answer["Instances"]]
        if request.method not in _CREATING:
            return None
        kind, key, name_key = _CREATING[request.method]
        answer = answer.get("PlacementGroup", answer)
        name = str(request.params.get(name_key) or answer.get("PublicIp") or "")
        pairs = request.params.get("TagSpecifications") or [{}]
        own = decode(pairs[0].get("Tags", []))
        self.resources.append(Resource(kind, one_line(str(answer.get(key) or name)), own, name))
        return self.resources[-1]

    def may_have(self, step: str) -> bool:
        """Return whether a call of this step may have had an effect that AWS has not confirmed."""
        return step in self._unanswered

    @property
    def known(self) -> KnownIds:
        """What exists, or may exist."""
        listed_from = self._last_answer + timing.current().settle
        return KnownIds(
            tuple(self.instances), tuple(self.resources), listed_from, uncertain=bool(self._unanswered)
        )


def _had_no_effect(request: Request, error: CloudDDPError) -> bool:
    """Return whether a call that raised this error has created nothing. A UsageError: it was not sent."""
    if not isinstance(error, AWSError):
        return True
    # Credentials that could not be loaded: it was not sent.
    refused = error.code not in _AMBIGUOUS if error.code else isinstance(error, CredentialsError)
    # Without a connection a key pair exists only if an earlier attempt was lost. It costs nothing, and the
    # next `up` of the name removes it: an offline computer must not report leftovers.
    refused = refused or (error.unsent and request.method == "import_key_pair")
    return refused and not _may_have_repeated(request, error.retries)


def _may_have_repeated(request: Request, retries: int) -> bool:
    """Return whether botocore may have repeated a lost call that has no idempotency token."""
    return retries > 0 and request.method == "allocate_address"


def from_journal(folder: ClusterFolder) -> KnownIds:
    """Return what a command of this computer has created that AWS may not list by tag yet: the steps that an
    `up` or a `resume` that was killed has begun, and the answers that it received. Nothing once the cluster
    was ready. Raises OSError, CloudDDPError."""
    events = folder.events()
    ready = [number for number, event in enumerate(events) if event.get("event") == READY]
    events = events[ready[-1] + 1 :] if ready else events
    now, settle = datetime.now(UTC), timing.current().settle
    fresh = [event for event in events if 0 <= _age(event, now) < settle]
    creating = [event for event in fresh if event.get("method") in {RUN, *_CREATING}]
    answered = {event.get("step") for event in fresh}
    if not creating:
        return NOTHING
    return KnownIds(
        resources=tuple(_resources(fresh, Tags(cluster_id=folder.id))),
        listed_from=time.monotonic() + settle - min(_age(event, now) for event in creating),
        uncertain=any(event.get("event") not in answered for event in creating),
    )


def combined(parts: Iterable[KnownIds]) -> KnownIds:
    """Return what is known of several clusters."""
    found = list(parts)
    return KnownIds(
        tuple(instance for part in found for instance in part.instances),
        tuple(resource for part in found for resource in part.resources),
        max((part.listed_from for part in found), default=0.0),
        any(part.uncertain for part in found),
    )


def _age(event: Mapping[str, Any], now: datetime) -> float:
    try:
        return (now - datetime.fromisoformat(str(event.get("time")))).total_seconds()
    except (ValueError, TypeError):  # TypeError: without a time zone
        return float("inf")


def _resources(events: Iterable[Mapping[str, Any]], tags: Tags) -> Iterable[Resource]:
    for event in events:
        kind, found, detail = (one_line(str(event.get(key) or "")) for key in ("kind", "id", "detail"))
        if event.get("event") == CREATED and kind in _KINDS and found:
            yield Resource(kind, found, tags, detail)

"""When nodes end: at their deadline, or once they have been unused for their grace, whichever is first.

A timer of root on each node decides that (infra/node/cloudddp-idle.sh). The grace is that of the last job
with --down, which the nodes know and AWS does not: a file in the cluster's folder has what this computer has
written last on the nodes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from cloudddp.cluster.model import Cluster
from cloudddp.errors import CloudDDPError, Message
from cloudddp.formats import duration, format_time
from cloudddp.local_state import ClusterFolder
from cloudddp.tags import parse_time

_LATE = 60.0  # seconds after which a node that should have ended is reported: the timer looks each 15


class PlannedEnd(msgspec.Struct, frozen=True):
    """The nodes end once they have been unused for so many minutes, because of a job."""

    job: Annotated[str, Meta(pattern="^[0-9A-Za-z-]{1,64}$")]
    minutes: Annotated[float, Meta(ge=0, le=1e7)]


def deadline(cluster: Cluster) -> datetime | None:
    """Return the deadline: as AWS has listed it, or as a later `extend` of this computer has recorded it."""
    folder = ClusterFolder(cluster.id) if cluster.id else None
    record = folder.record() if folder else None
    if folder is None or record is None or not record.extended or folder.changed() <= cluster.seen:
        return cluster.expires
    return parse_time(record.expires) or cluster.expires


def ends_at(deadline: float | None, grace: float | None, used: float, now: float) -> float | None:
    """Return when a node ends, if it is not used again; None: never. Pure. Times are in seconds since the
    epoch; `used`: the last use, which a clock may put into the future."""
    unused = None if grace is None else min(used, now) + grace
    return min((one for one in (deadline, unused) if one is not None), default=None)


@dataclass(frozen=True, slots=True)
class NodesEnd:
    """`grace`: seconds without a use after which the nodes end, None: they do not; `why`: what it is for.
    `used`: when they were last used, since the epoch; None: they are in use, or it is not known."""

    deadline: datetime | None
    grace: float | None = None
    why: str = ""
    used: float | None = None

    @property
    def unused(self) -> str:
        """The end that may come before the deadline, as a part of a sentence; '' where there is none."""
        if self.grace is None:
            return ""
        when = f"once unused for {duration(self.grace)}" if self.grace else "as soon as they are unused"
        return f"{when} ({self.why})"

    @property
    def sentence(self) -> str:
        """When the nodes end, why, and what ends them now."""
        now = datetime.now(UTC).timestamp()
        last = self.deadline.timestamp() if self.deadline else None
        at = ends_at(last, self.grace, now if self.used is None else self.used, now)
        when = format_time(datetime.fromtimestamp(at or 0.0, UTC))
        if at is None:
            text = "have no deadline:"
        elif at == last or self.grace is None:
            grace = f"{duration(self.grace)} without a use ({self.why})" if self.grace else ""
            text = f"end at {when}, their deadline{f', which comes before {grace}' if grace else ''}:"
        elif self.used is None:
            until = f"at {format_time(self.deadline)} (their deadline), or " if self.deadline else ""
            text = f"end {until}{self.unused}:"
        elif at < now - _LATE:
            text = f"should have ended at {when} ({self.why}) and still run:"
        else:
            text = f"end in {duration(at - now)}, at {when}, unless they are used until then: {self.why};"
        return Message(f"the nodes {text} `cloudddp down` ends them now")


def of(cluster: Cluster) -> NodesEnd:
    """Return when the nodes of a cluster end, as far as this computer knows."""
    end = NodesEnd(deadline(cluster))
    if (plan := planned(cluster.id)) is not None:
        return replace(end, grace=60 * plan.minutes, why=f"--keep of job {plan.job}")
    if cluster.idle_minutes:
        return replace(end, grace=60 * cluster.idle_minutes, why="idle_minutes")
    return end


def planned(cluster_id: str) -> PlannedEnd | None:
    """Return what this computer has written last on the nodes of a cluster, or None."""
    if not cluster_id:
        return None
    with contextlib.suppress(CloudDDPError, OSError, ValueError, RecursionError):  # msgspec's are ValueErrors
        folder = ClusterFolder(cluster_id)
        return msgspec.json.decode(folder.read(folder.grace) or "", type=PlannedEnd)
    return None


def note(cluster_id: str, plan: PlannedEnd | None) -> None:
    """Record what is written on the nodes, before it is; nothing for the cluster of a rehearsal."""
    folder = ClusterFolder(cluster_id)
    with contextlib.suppress(CloudDDPError, OSError):
        if plan is None:
            folder.remove(folder.grace)
        elif folder.exists:
            folder.write(folder.grace, msgspec.json.encode(plan).decode())

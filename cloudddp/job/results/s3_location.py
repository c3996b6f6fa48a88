"""Where the results of a job are in Amazon S3, from the settings. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cloudddp.agent.protocol.copies import Destination, url_of
from cloudddp.config import timing
from cloudddp.config.spec import Config


@dataclass(frozen=True, slots=True)
class Place:
    """Objects of a bucket whose keys begin with `prefix` and a slash."""

    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        return url_of(self.bucket, self.prefix)


def place_of(config: Config, job_id: str) -> Place | None:
    """Return where the nodes copy a job's results to, or None."""
    if config.job.results_s3 is None:
        return None
    bucket, _, prefix = config.job.results_s3.removeprefix("s3://").partition("/")
    return Place(bucket, "/".join(filter(None, (prefix.strip("/"), config.cluster.name, job_id))))


def destination(config: Config, job_id: str) -> Destination | None:
    """Return what the nodes are told, or None."""
    place, limits = place_of(config, job_id), timing.current()
    if place is None:
        return None
    return Destination(
        place.bucket,
        place.prefix,
        tuple(config.job.outputs),
        limit=limits.copy,
        patience=limits.copy_stalled,
        scratch=tuple(config.job.scratch),
    )

"""What the user asked for, as frozen records: ClusterSpec, JobSpec, SyncSpec and SetupSpec.

Each field has its type and its limits; its help is in descriptions.py. settings.py merges the sources and
validates the values.
"""

from __future__ import annotations

import msgspec

from cloudddp.config.spec.cluster import ClusterSpec
from cloudddp.config.spec.job import JobSpec, SetupSpec, SyncSpec

__all__ = ["ClusterSpec", "Config", "JobSpec", "SetupSpec", "SyncSpec"]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings."""

    cluster: ClusterSpec = ClusterSpec()
    job: JobSpec = JobSpec()
    sync: SyncSpec = SyncSpec()
    setup: SetupSpec = SetupSpec()

"""Writes the report of a job beside its logs."""

from __future__ import annotations

import contextlib
from pathlib import Path

from cloudddp.errors import CloudDDPError
from cloudddp.formats import from_here
from cloudddp.job import launch_record
from cloudddp.job.report import page
from cloudddp.local_state import folder_of_job
from cloudddp.operations.reporter import Reporter
from cloudddp.text import reason_of


def write_report(console: Reporter, job_id: str, folder: Path) -> None:
    """Write the report into the folder of a job's results. Never fails."""
    try:
        console.log(f"report: {from_here(write(job_id, folder))}")
    except Exception as error:  # also a bug: the results are here
        console.warn(f"the report of job {job_id} was not written: {reason_of(error)}")


def write(job_id: str, folder: Path) -> Path:
    """Write the report from what is on this computer; return its path. Raises OSError."""
    cluster, launch, journal = folder_of_job(job_id), None, []
    with contextlib.suppress(CloudDDPError, OSError, ValueError):
        if cluster is not None:
            journal = cluster.events()
            launch = launch_record.find(cluster, job_id)
    return page.write(page.Evidence(job_id, folder, launch, journal))

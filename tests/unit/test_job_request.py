"""The ids of jobs."""

from __future__ import annotations

import time

from cloudddp.agent.protocol.codec import has_job_id_format
from cloudddp.job.job_request import NewJob
from cloudddp.job.ranks import Script


def test_ids_of_one_second_sort_by_time() -> None:
    ids = []
    for _ in range(20):
        ids.append(NewJob(Script("a.py", (), False)).id)
        time.sleep(0.005)
    assert ids == sorted(ids)
    assert all(map(has_job_id_format, ids))

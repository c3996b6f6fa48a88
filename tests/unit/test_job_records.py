"""A job on all its nodes together, as `jobs` lists it, and the ids of jobs."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from support.jobstates import agreed, job, rank

from cloudddp.agent.protocol.codec import has_job_id_format
from cloudddp.agent.protocol.progress import Straggler
from cloudddp.cli.views.jobs import jobs_json, jobs_table, troubles
from cloudddp.job.job_request import NewJob
from cloudddp.job.ranks import Script
from cloudddp.job.status import find, record


def test_job_with_unknown_end_has_no_end_and_no_time() -> None:
    """Its supervisor is gone: nobody has recorded when it ended."""
    lost = record("j", {0: job("lost", rank(0), started=1000.0)})
    assert (lost.status, lost.ended, lost.seconds) == ("lost", None, None)
    assert jobs_json([lost])[0]["ended"] is None
    assert jobs_table([lost]).splitlines()[1].split()[1:4] == ["lost", "-", "-"]


def test_job_ends_when_it_has_ended_on_every_node() -> None:
    states = {0: job("failed", started=1000.0, ended=1010.0), 1: job("failed", started=1001.0, ended=1030.0)}
    found = record("j", states)
    assert (found.started, found.ended, found.seconds) == (1000.0, 1030.0, 30.0)


def test_job_ends_with_its_verdict_whichever_nodes_answer() -> None:
    """A node that was frozen learns of it later."""
    verdict = replace(agreed(), at=1020.0)
    states = {number: job("failed", started=1000.0, ended=1099.0, verdict=verdict) for number in range(2)}
    assert record("j", states).seconds == record("j", {1: states[1]}).seconds == 20.0


def test_job_that_runs_is_preferred_to_a_newer_one_that_has_ended() -> None:
    ended = record("20990101-000000-ffff", {1: job("succeeded")})
    running = record("20260101-000000-abcd", {0: job("running"), 1: job("running")})
    older = record("20250101-000000-abcd", {0: job("failed")})
    assert find([older, running, ended], None) is running
    assert find([older, ended], None) is ended
    assert find([older, running, ended], ended.id) is ended


def test_job_runs_until_it_has_ended_on_every_node_that_answers() -> None:
    """Nodes that cannot reach each other decide apart, and not at the same moment."""
    states = {0: job("running", started=1000.0), 1: job("failed", started=1000.0, verdict=agreed())}
    found = record("j", states)
    assert (found.status, found.exit_code, found.ended, found.cause) == ("running", None, None, "")


@pytest.mark.parametrize("until", [None, 1010.0])
def test_straggler_is_shown_until_it_has_caught_up(until: float | None) -> None:
    slow = Straggler(1, 0, 0.05, 0.02, step=7, since=1000.0, own=True, until=until)
    known = [record("j", {0: job("running", rank(1), stragglers=(slow,))})]
    is_slow = until is None
    assert ("straggler: rank 1 (2.5 x)" in jobs_table(known)) is is_slow
    assert ["rank 1 takes 2.5 x as long as the median rank" in str(one) for one in troubles(known)] == [
        True
    ] * is_slow
    (found,) = jobs_json(known)[0]["stragglers"]
    assert (found["rank"], found["node"], found["times_median"], found["measured"]) == (1, 0, 2.5, "work")
    assert (found["seconds_per_step"], found["median_seconds_per_step"]) == (0.05, 0.02)
    assert (found["since_step"], found["until"] is None) == (7, is_slow)


def test_ids_of_one_second_sort_by_time() -> None:
    ids = []
    for _ in range(20):
        ids.append(NewJob(Script("a.py", (), False)).id)
        time.sleep(0.005)
    assert ids == sorted(ids)
    assert all(map(has_job_id_format, ids))

"""Notices that a node is about to end: of EC2 in the instance metadata, and the cluster's deadline."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.agentnode import FOREVER, SAVES, Node, first_of, until
from support.imds import Metadata

from agent.jobs import poweroff
from agent.node import imds
from agent.watch import notices
from cloudddp.agent.protocol.jobs import Cause, Failure, Verdict
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Deadline


def after(seconds: float) -> datetime:
    return datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=seconds)


def test_spot_notice_lets_ranks_save(node: Node, metadata: Metadata) -> None:
    """The grace is what the notice leaves, and not stop_grace, which is 0 here."""
    node.start(SAVES, grace=0.0, retries=5)
    until((node.project / "ready").exists)
    ends = metadata.announce(120)
    state = node.ended()
    assert (node.project / "saved").read_text() == "x"
    detail = f"AWS ends it at {ends:%H:%M:%S} UTC (spot notice)"
    first = Failure(0, Cause.NOTICE, exit_code=143, detail=detail)
    assert state.verdict == Verdict(JobPhase.FAILED, 143, 0, first, at=state.ended)
    assert state.ranks[0].exit_code == 143


def event(state: str, code: str, when: datetime) -> dict[str, str]:
    """The form of the events: EC2 User Guide, "View scheduled events"."""
    return {
        "NotBefore": f"{when:%d %b %Y %H:%M:%S} GMT",
        "Code": code,
        "Description": "scheduled reboot",
        "EventId": "instance-event-0d59937288b749b32",
        "State": state,
    }


def test_maintenance_is_announced_days_before(metadata: Metadata) -> None:
    begins = after(600)
    listed = [
        event("completed", "system-reboot", after(60)),
        event("active", "instance-reboot", begins),
        event("active", "system-maintenance", after(-3600)),
        event("active", "instance-stop", after(900)),
    ]
    metadata.found["events/maintenance/scheduled"] = json.dumps(listed)
    notice = notices._maintenance(imds.Metadata(metadata.address), 300.0)
    assert notice is not None
    assert (
        notice.detail == f"AWS reboots it at {begins:%H:%M:%S} UTC (scheduled maintenance: instance-reboot)"
    )
    assert not notice.is_due
    assert replace(notice, ends=notice.ends - 400).is_due


def test_unreadable_notices_are_ignored(node: Node, metadata: Metadata) -> None:
    metadata.found = {"spot/instance-action": '{"time": "tomorrow"}', "events/maintenance/scheduled": "[1]"}
    node.start(FOREVER)
    until(lambda: metadata.looks)
    assert not node.state().phase.ended
    node.cancel()


def test_deadline_is_announced_once_and_again_where_it_was_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(imds.VARIABLE, "")
    watch = notices.NoticeWatch(Deadline(100.0, "12:00"), 1.0)
    assert watch.announcement(90.0) is None
    found = [watch.announcement(110.0) for _ in range(2)]
    assert [one and one.detail for one in found] == ["the cluster's deadline is at 12:00", None]
    monkeypatch.setattr(poweroff, "MOVED", tmp_path / "deadline")
    poweroff.MOVED.write_text(f"{time.time() + 95.0:.0f}\n")
    assert [watch.announcement(110.0) is None for _ in range(2)] == [False, True]


def test_job_follows_a_deadline_that_is_moved(node: Node) -> None:
    """Also with nobody connected: `extend` leaves the new one on the node."""
    node.start(SAVES, deadline=Deadline(600.0, "the old time"), save=15.0)
    until((node.project / "ready").exists)
    ends = time.time() + 20.0
    (node.store / "deadline").write_text(f"{ends}\n")
    at = datetime.fromtimestamp(ends, UTC)
    assert first_of(node.ended()).detail == f"the cluster's deadline is at {at:%Y-%m-%d %H:%M} UTC"


def test_deadline_is_a_notice(node: Node) -> None:
    """A job that begins shortly before the deadline is told to save in the middle of the time that is
    left."""
    node.start(SAVES, deadline=Deadline(12.0, "2030-01-01 12:00 UTC"), save=15.0)
    until((node.project / "ready").exists)
    state = node.ended()
    assert (node.project / "saved").exists()
    assert first_of(state).detail == "the cluster's deadline is at 2030-01-01 12:00 UTC"
    assert state.exit_code == 143

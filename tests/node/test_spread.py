"""Before ranks continue from a snapshot, the newest one is copied to the nodes that lack it, with nobody
connected."""

from __future__ import annotations

import os
import sys
import time
import zipfile
from pathlib import Path

import pytest
from support.agentnode import until
from support.gangs import Gangs, Make, kill

from cloudddp.agent.protocol.jobs import Cause
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.snapshots import Snapshot, SnapshotSearch, refusal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

SNAPSHOTS = SnapshotSearch("p", ("runs/**/*.bin", "runs/*.pt"), ("runs/base.bin",))
# What each rank finds when it starts.
FINDS = """
import os, pathlib
found = sorted(p for p in pathlib.Path('runs').rglob('*') if p.is_file())
print('finds', *[f'{p.name}:{p.read_bytes()[:9].decode()}:{p.stat().st_mtime_ns}' for p in found], flush=True)
"""
# As most scripts do, only rank 0 saves; it fails once node 1 has begun.
SAVES = (
    FINDS
    + """
import sys, time
if os.environ['CLOUDDDP_ATTEMPT'] == '0':
    if os.environ['RANK'] == '0':
        os.makedirs('runs/a', exist_ok=True)
        with open('runs/a/step.bin', 'wb') as file: file.write(b'of rank 0' + os.urandom(3_000_000))
        sys.exit(3)
    time.sleep(600)
"""
)


def hold(job: Gangs, node: int, name: str, text: bytes, mtime: float) -> Path:
    path = job[node].project / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    os.utime(path, (mtime, mtime))
    return path


def finds(job: Gangs, node: int) -> list[str]:
    """What the ranks of a node have found, attempt by attempt."""
    return [line for line in job.log(node, node).decode().splitlines() if line.startswith("finds")]


def notes(job: Gangs, node: int) -> str:
    found = job.log(node, node).decode() + (job[node].folder() / "launcher.log").read_text()
    return "\n".join(line for line in found.splitlines() if line.startswith("--- cloudddp: "))


def test_ranks_that_start_again_find_the_newest_snapshot_on_every_node(gangs: Make) -> None:
    job = gangs(3)
    hold(job, 1, "runs/old.bin", b"old", 1e9)
    job.start(SAVES, SAVES, SAVES, retries=1, snapshots=SNAPSHOTS)
    verdict = job.verdict()
    assert (verdict.phase, verdict.restarts) == (JobPhase.SUCCEEDED, 1)
    saved = job[0].project / "runs/a/step.bin"
    for node in (1, 2):
        copy = job[node].project / "runs/a/step.bin"
        assert copy.read_bytes() == saved.read_bytes()
        assert copy.stat().st_mtime_ns == saved.stat().st_mtime_ns
        assert f"step.bin:of rank 0:{saved.stat().st_mtime_ns}" in finds(job, node)[1], (
            "before its rank started"
        )
        note = "copying runs/a/step.bin, 3.0 MB, the newest snapshot, from node 0 to node 1, 2"
        assert notes(job, node).count(note) == 1


def test_resumed_job_begins_with_the_newest_valid_snapshot(gangs: Make) -> None:
    """That of node 1 is newer than that of node 0, and a still newer one is damaged."""
    job = gangs(3)
    for node, text in ((0, "older"), (1, "newer")):
        path = hold(job, node, "runs/good.pt", b"", 1e9)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x", text)
        os.utime(path, (1e9 + node, 1e9 + node))
    hold(job, 1, "runs/broken.pt", b"PK" + bytes(99), 2e9)
    hold(job, 0, "runs/base.bin", b"a file of the project", 3e9)
    code = "import zipfile; print('finds', zipfile.ZipFile('runs/good.pt').read('x').decode(), flush=True)"
    job.start(code, code, code, snapshots=SNAPSHOTS, resumed_from="20260101-000000-abcd")
    assert job.verdict().phase is JobPhase.SUCCEEDED
    assert [finds(job, node) for node in range(3)] == [["finds newer"]] * 3
    assert not (job[0].project / "runs/broken.pt").exists()
    assert not (job[2].project / "runs/base.bin").exists()
    assert "runs/broken.pt is damaged; an older snapshot is used" in notes(job, 1)


def test_first_start_copies_the_newest_snapshot_too(gangs: Make) -> None:
    """A second `launch` on the same nodes, where only the node of rank 0 has what the first one saved. A file
    that a killed agent has begun is no snapshot."""
    job = gangs(2)
    hold(job, 0, "runs/old.bin", b"old", 1e9)
    begun = [hold(job, node, "runs/.4711.cloudddp-tmp", b"half", 2e9) for node in range(2)]
    job.start(FINDS, FINDS, snapshots=SnapshotSearch("p", ("runs/*",)))
    assert job.verdict().phase is JobPhase.SUCCEEDED
    assert finds(job, 1) == ["finds old.bin:old:1000000000000000000"]
    assert not begun[1].exists()


def test_every_shared_file_is_on_all_nodes_in_its_newest_version(gangs: Make) -> None:
    """The files of one folder come from several nodes, to all nodes."""
    job = gangs(3)
    newest = {
        "runs/sub/.state": 0,
        "runs/sub/0": 0,
        "runs/sub/2": 1,
        "runs/log.bin": 2,
    }
    for name, node in newest.items():
        hold(job, node, name, f"by {node}".encode(), 15e8)
    hold(job, 0, "runs/log.bin", b"older", 1e9)
    hold(job, 1, "runs/base.bin", b"a file of the project", 16e8)
    hold(job, 1, "other.bin", b"not shared", 16e8)
    broken = hold(job, 2, "runs/broken.pt", b"PK" + bytes(99), 15e8)
    share = SnapshotSearch("p", ("runs", "runs/**"), ("runs/base.bin",), every=True)
    job.start(FINDS, FINDS, FINDS, snapshots=share)
    assert job.verdict().phase is JobPhase.SUCCEEDED
    for node in range(3):
        for name, source in newest.items():
            copy = job[node].project / name
            assert (copy.read_bytes(), copy.stat().st_mtime) == (f"by {source}".encode(), 15e8)
    assert not (job[0].project / "runs/base.bin").exists()
    assert not (job[0].project / "other.bin").exists()
    assert not (job[0].project / broken.relative_to(job[2].project)).exists()
    assert "and 1 more, 0.0 MB, which only some nodes have, from node 0 to node 1, 2" in notes(job, 0)
    assert "node 2: runs/broken.pt is damaged, or has gone; it was not copied" in notes(job, 0)


def test_ranks_begin_anew_where_no_node_has_a_snapshot(gangs: Make) -> None:
    job = gangs(2)
    job.start(FINDS, FINDS, snapshots=SNAPSHOTS, resumed_from="20260101-000000-abcd")
    assert job.verdict().phase is JobPhase.SUCCEEDED
    assert "no node has a snapshot that matches runs/**/*.bin, runs/*.pt" in notes(job, 0)
    assert [finds(job, node) for node in range(2)] == [["finds"]] * 2


def test_node_that_cannot_write_is_named_and_no_rank_starts(gangs: Make) -> None:
    """It is tried as often as any failure that comes again."""
    job = gangs(2)
    hold(job, 0, "runs/a/step.bin", b"saved", 1e9)
    (job[1].project / "runs/a/step.bin").mkdir(parents=True)
    job.start(FINDS, FINDS, snapshots=SNAPSHOTS, resumed_from="20260101-000000-abcd", retries=9)
    verdict = job.verdict()
    assert (verdict.phase, verdict.exit_code) == (JobPhase.FAILED, 1)
    assert (verdict.restarts, verdict.refusal) == (2, "the same failure has occurred 3 times")
    assert verdict.first is not None
    assert (verdict.first.node, verdict.first.cause) == (1, Cause.SNAPSHOT)
    assert "runs/a/step.bin was not copied from node 0" in verdict.first.detail
    assert "Is a directory" in verdict.first.detail
    assert [finds(job, node) for node in range(2)] == [[], []]
    assert [path.name for path in job[1].project.rglob("*tmp*")] == []


def test_file_that_is_no_snapshot_is_refused(gangs: Make) -> None:
    """A node that was taken over offers it: its own agent was asked for other patterns."""
    job = gangs(2)
    mine = hold(job, 1, "runs/base.bin", b"mine", 1e9)
    hold(job, 0, "runs/base.bin", b"evil", time.time() + 60)
    common = {"gang": job.gang, "resumed_from": "20260101-000000-abcd"}
    evil = SnapshotSearch("p", ("**/*",))
    job.start_requests(
        {
            job[0]: job[0].starting(FINDS, snapshots=evil, **common),
            job[1]: job[1].starting(FINDS, first_rank=1, snapshots=SNAPSHOTS, **common),
        }
    )
    verdict = job.verdict()
    assert verdict.first is not None
    assert verdict.first.cause is Cause.SNAPSHOT
    refused = "'runs/base.bin' is no snapshot of this job: nothing was copied"
    assert verdict.first.detail == f"node 0 reports its newest snapshot, and {refused}"
    assert mine.read_bytes() == b"mine"
    assert finds(job, 1) == []


@pytest.mark.parametrize(
    ("path", "mtime_ns", "expected"),
    [
        ("runs/new.bin", 5, ""),
        ("train.py", 5, "'train.py' is no snapshot of this job"),
        ("runs/base.bin", 5, "'runs/base.bin' is no snapshot of this job"),
        ("runs/new.bin", 7, "the time of 'runs/new.bin' is more than a day in the future"),
        ("", 5, ""),
    ],
)
def test_reason_to_refuse_a_snapshot(path: str, mtime_ns: int, expected: str) -> None:
    assert refusal(Snapshot(path, mtime_ns), SNAPSHOTS, latest_ns=6) == expected


def huge(job: Gangs, node: int) -> None:
    """A snapshot that is not read to its end within the limit of a test."""
    with hold(job, node, "runs/huge.bin", b"", 1e9).open("wb") as file:
        file.truncate(1 << 40)


def test_cancel_does_not_wait_for_a_copy(gangs: Make) -> None:
    job = gangs(2)
    huge(job, 0)
    job.start(FINDS, FINDS, snapshots=SNAPSHOTS, resumed_from="20260101-000000-abcd")
    job[1].cancel(grace=1.0)
    assert job.verdict().phase is JobPhase.CANCELLED
    assert [finds(job, node) for node in range(2)] == [[], []]


def test_node_that_is_lost_during_a_copy_is_named(gangs: Make) -> None:
    job = gangs(2)
    huge(job, 0)
    job.start(FINDS, FINDS, snapshots=SNAPSHOTS, resumed_from="20260101-000000-abcd")
    supervisor = job[0].supervisor_pid()
    until(lambda: job[1].state().phase is JobPhase.RUNNING)
    kill(supervisor)
    verdict = job.verdict(1)
    assert verdict.first is not None
    assert (verdict.first.node, verdict.first.cause) == (0, Cause.AGENT)
    job.gone(0, 1)

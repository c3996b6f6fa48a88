"""The newest snapshot is copied with nobody connected: before ranks continue from it, to the nodes that lack
it; before a node ends, to a node that stays."""

from __future__ import annotations

import os
import time
import zipfile
from pathlib import Path

from support.agentnode import FOREVER, SAVES, first_of, until
from support.gangs import Gangs, Make
from support.imds import Metadata

from cloudddp.agent.protocol.jobs import Cause
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.sharing import SnapshotSearch

SNAPSHOTS = SnapshotSearch("p", ("runs/**/*.bin", "runs/*.pt"), ("runs/base.bin",))
# What each rank finds when it starts.
FINDS = """
import os, pathlib
found = sorted(p for p in pathlib.Path('runs').rglob('*') if p.is_file())
print('finds', *[f'{p.name}:{p.read_bytes()[:9].decode()}:{p.stat().st_mtime_ns}' for p in found], flush=True)
"""
# As most scripts do, only rank 0 saves; then it fails. The other ranks may have ended before they begin.
FAILS = (
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


def test_ranks_that_start_again_find_the_newest_snapshot_on_every_node(gangs: Make) -> None:
    job = gangs(3)
    job.start(FAILS, FAILS, FAILS, retries=1, snapshots=SNAPSHOTS, resumed_from="20260101-000000-abcd")
    verdict = job.verdict()
    assert (verdict.phase, verdict.restarts) == (JobPhase.SUCCEEDED, 1)
    assert "no node has a snapshot that matches runs/**/*.bin, runs/*.pt" in job.notes(0)
    saved = job[0].project / "runs/a/step.bin"
    for node in (1, 2):
        copy = job[node].project / "runs/a/step.bin"
        assert copy.read_bytes() == saved.read_bytes()
        assert copy.stat().st_mtime_ns == saved.stat().st_mtime_ns
        # Before its rank started.
        assert f"step.bin:of rank 0:{saved.stat().st_mtime_ns}" in finds(job, node)[-1]
        note = "copying runs/a/step.bin, 3.0 MB, the newest snapshot, from node 0 to node 1, 2"
        assert job.notes(node).count(note) == 1


def test_resumed_job_begins_with_the_newest_valid_snapshot(gangs: Make) -> None:
    """That of node 1 is newer than that of node 0, and a still newer one is damaged."""
    job = gangs(2)
    for node, text in ((0, "older"), (1, "newer")):
        path = hold(job, node, "runs/good.pt", b"", 1e9)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x", text)
        os.utime(path, (1e9 + node, 1e9 + node))
    hold(job, 1, "runs/broken.pt", b"PK" + bytes(99), 2e9)
    code = "import zipfile; print('finds', zipfile.ZipFile('runs/good.pt').read('x').decode(), flush=True)"
    job.start(code, code, snapshots=SNAPSHOTS, resumed_from="20260101-000000-abcd")
    assert job.verdict().phase is JobPhase.SUCCEEDED
    assert [finds(job, node) for node in range(2)] == [["finds newer"]] * 2
    assert not (job[0].project / "runs/broken.pt").exists()
    assert "runs/broken.pt is damaged; an older snapshot is used" in job.notes(1)


def test_every_shared_file_is_on_all_nodes_in_its_newest_version(gangs: Make) -> None:
    """The files of one folder come from several nodes."""
    job = gangs(3)
    newest = {"runs/sub/.state": 0, "runs/sub/0": 0, "runs/sub/2": 1, "runs/log.bin": 2}
    for name, node in newest.items():
        hold(job, node, name, f"by {node}".encode() * 500_000, 15e8)
    hold(job, 0, "runs/log.bin", b"older", 1e9)
    hold(job, 1, "runs/base.bin", b"a file of the project", 16e8)
    hold(job, 1, "other.bin", b"not shared", 16e8)
    hold(job, 2, "runs/broken.pt", b"PK" + bytes(99), 15e8)
    share = SnapshotSearch("p", ("runs", "runs/**"), ("runs/base.bin",), every=True)
    job.start(*[FINDS] * 3, snapshots=share)
    assert job.verdict().phase is JobPhase.SUCCEEDED
    for node in range(3):
        for name, source in newest.items():
            copy = job[node].project / name
            assert (copy.read_bytes(), copy.stat().st_mtime) == (f"by {source}".encode() * 500_000, 15e8)
    for name in ("runs/base.bin", "other.bin", "runs/broken.pt"):
        assert not (job[0].project / name).exists()
    assert "4.0 MB, which only some nodes have, from node 0 to node 1, 2" in job.notes(0)
    assert "node 2: runs/broken.pt is damaged, or no longer exists; it was not copied" in job.notes(0)


def test_node_that_cannot_write_is_named_and_no_rank_starts(gangs: Make) -> None:
    """It is tried as often as any failure that comes again."""
    job = gangs(2)
    hold(job, 0, "runs/a/step.bin", b"saved", 1e9)
    (job[1].project / "runs/a/step.bin").mkdir(parents=True)
    job.start(FINDS, FINDS, snapshots=SNAPSHOTS, resumed_from="20260101-000000-abcd", retries=9)
    verdict = job.verdict()
    assert (verdict.phase, verdict.exit_code) == (JobPhase.FAILED, 1)
    assert (verdict.restarts, verdict.refusal) == (2, "the same failure has occurred 3 times")
    first = first_of(verdict)
    assert (first.node, first.cause) == (1, Cause.SNAPSHOT)
    assert first.detail == "files were not copied from node 0: runs/a/step.bin: Is a directory"
    assert [finds(job, node) for node in range(2)] == [[], []]


def test_file_that_is_no_snapshot_is_refused(gangs: Make) -> None:
    """A node that was taken over offers it: its own agent was asked for other patterns."""
    job = gangs(2)
    mine = hold(job, 1, "runs/base.bin", b"mine", 1e9)
    hold(job, 0, "runs/base.bin", b"evil", time.time() + 60)
    evil = {0: {"snapshots": SnapshotSearch("p", ("**/*",))}}
    job.start(FINDS, FINDS, of_node=evil, snapshots=SNAPSHOTS, resumed_from="20260101-000000-abcd")
    first = first_of(job.verdict())
    refused = "'runs/base.bin' is no snapshot of this job: nothing was copied"
    expected = f"node 0 reports its newest snapshot, and {refused}"
    assert (first.cause, first.detail) == (Cause.SNAPSHOT, expected)
    assert mine.read_bytes() == b"mine"
    assert finds(job, 1) == []


def test_cancelled_job_does_not_wait_for_a_copy(gangs: Make) -> None:
    job = gangs(2)
    with hold(job, 0, "runs/huge.bin", b"", 1e9).open("wb") as file:
        file.truncate(1 << 40)  # it is not read to its end within the limit of a test
    job.start(FINDS, FINDS, snapshots=SNAPSHOTS, resumed_from="20260101-000000-abcd")
    job[1].cancel(grace=1.0)
    assert job.verdict().phase is JobPhase.CANCELLED
    assert [finds(job, node) for node in range(2)] == [[], []]


SAVED = SnapshotSearch("p", ("saved", "old"))


def preempted(job: Gangs, metadata: Metadata, **changes: object) -> None:
    """Run a job, of which rank 0 saves, until the first node gets a spot notice and the job has ended, with
    all that follows."""
    job[0].metadata = metadata.address
    job.start(SAVES, *[FOREVER] * (len(job.nodes) - 1), snapshots=SAVED, **changes)
    until((job[0].project / "ready").exists)
    for number in range(len(job.nodes)):
        job.pid(number, number)  # its wrapper passes SIGTERM on
    metadata.announce(120)
    first = first_of(job.verdict())
    assert (first.cause, first.node) == (Cause.NOTICE, 0)
    job.gone()


def test_newest_snapshot_is_sent_to_the_first_node_that_stays(gangs: Make, metadata: Metadata) -> None:
    job = gangs(3)
    for node in range(3):
        hold(job, node, "old", b"old", 1e9)
    preempted(job, metadata)
    saved, copy, other = (node.project / "saved" for node in job.nodes)
    assert (copy.read_text(), copy.stat().st_mtime_ns) == ("x", saved.stat().st_mtime_ns)
    assert not other.exists()
    for number in range(2):
        note = "--- cloudddp: saved, the newest snapshot of node 0, was copied to node 1 ---"
        assert note in job.notes(number)


def test_snapshot_that_is_not_taken_is_named(gangs: Make, metadata: Metadata) -> None:
    """As if a node that was taken over had looked for others."""
    job = gangs(2)
    (job[1].project / "saved").mkdir()
    preempted(job, metadata, of_node={1: {"snapshots": SnapshotSearch("p", ("others",))}})
    for number in range(2):
        note = "the newest snapshot of node 0 was not copied to node 1: 'saved' is no snapshot of this job"
        assert note in job.notes(number)

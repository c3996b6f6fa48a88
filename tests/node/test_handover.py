"""Before a node ends, its newest snapshot is sent to a node that stays, with nobody connected."""

from __future__ import annotations

import os

import pytest
from support.agentnode import Node, first_of, until
from support.gangs import Gangs, Make
from support.imds import Metadata

from cloudddp.agent.protocol.jobs import Cause
from cloudddp.agent.protocol.sharing import SnapshotSearch
from cloudddp.agent.protocol.start import Deadline

SNAPSHOTS = SnapshotSearch("p", ("runs/**/*.bin",), ("runs/base.bin",))
# As most scripts do, only rank 0 saves.
SAVES = """
import os, signal, sys, time
def save(*_):
    if os.environ['RANK'] == '0':
        os.makedirs('runs/a', exist_ok=True)
        with open('runs/a/step.tmp', 'wb') as file: file.write(os.urandom(5_000_000))
        os.replace('runs/a/step.tmp', 'runs/a/step.bin')
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
open('ready', 'w').close()
while True: time.sleep(0.05)
"""


def preempted(job: Gangs, metadata: Metadata, **changes: object) -> None:
    """Run a job on all nodes until the first of them gets a spot notice and the job has ended, with all that
    follows."""
    job[0].metadata = metadata.address
    job.start(*[SAVES] * len(job.nodes), snapshots=SNAPSHOTS, **changes)
    for node in job.nodes:
        until((node.project / "ready").exists)
    for number in range(len(job.nodes)):
        job.pid(number, number)  # its wrapper passes SIGTERM on
    metadata.announce(120)
    first = first_of(job.verdict())
    assert (first.cause, first.node) == (Cause.NOTICE, 0)
    job.gone()


def held(node: Node) -> list[str]:
    return sorted(path.name for path in (node.project / "runs").rglob("*") if path.is_file())


def test_newest_snapshot_is_sent_to_the_first_node_that_stays(gangs: Make, metadata: Metadata) -> None:
    job = gangs(3)
    for node in job.nodes:
        old = node.project / "runs" / "old.bin"
        old.parent.mkdir()
        old.write_bytes(b"old")
        os.utime(old, (1e9, 1e9))
    preempted(job, metadata)
    saved, copy = (job[n].project / "runs/a/step.bin" for n in (0, 1))
    assert copy.exists(), [job.log(number, number) for number in range(3)]
    assert copy.read_bytes() == saved.read_bytes()
    assert copy.stat().st_mtime_ns == saved.stat().st_mtime_ns
    assert [held(node) for node in job.nodes] == [["old.bin", "step.bin"]] * 2 + [["old.bin"]]
    note = "--- cloudddp: runs/a/step.bin, the newest snapshot of node 0, was copied to node 1 ---"
    for number in range(2):
        assert note in job.notes(number)


def test_nothing_is_sent_at_the_deadline(gangs: Make) -> None:
    """It ends all nodes."""
    job = gangs(2)
    job.start(
        SAVES,
        SAVES,
        snapshots=SNAPSHOTS,
        deadline=Deadline(20.0, "2030-01-01 12:00 UTC"),
        save=18.0,
    )
    assert first_of(job.verdict()).cause is Cause.NOTICE
    assert held(job[0]) == ["step.bin"]
    assert held(job[1]) == []


@pytest.mark.parametrize(
    ("folder", "patterns", "why"),
    [
        ("runs/a/step.bin", "runs/**/*.bin", "runs/a/step.bin: Is a directory"),
        # As if a node that was taken over had looked for other files.
        ("runs", "others/*.bin", "'runs/a/step.bin' is no snapshot of this job"),
    ],
)
def test_snapshot_that_is_not_taken_is_named(
    gangs: Make, metadata: Metadata, folder: str, patterns: str, why: str
) -> None:
    job = gangs(2)
    (job[1].project / folder).mkdir(parents=True)
    preempted(job, metadata, of_node={1: {"snapshots": SnapshotSearch("p", (patterns,))}})
    for number in range(2):
        assert f"the newest snapshot of node 0 was not copied to node 1: {why}" in job.notes(number)
    assert held(job[1]) == []

"""Which nodes of a transfer make no progress, and which wait without a fault of their own."""

from __future__ import annotations

import pytest

from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.receive import COMPARED, WAITING, WRITING, ReceiveEvent
from cloudddp.agent.protocol.transfer import FILE_WORK, LAPTOP
from cloudddp.job.transfer_progress import (
    BYPASS,
    LEAST,
    STALLED,
    TO_DISK,
    Progress,
    Stall,
    next_source,
    stalled,
)
from cloudddp.job.transfer_reports import MAX_LINE, MAX_NOTES, MAX_REPORTS, Reports


def chain(*received: int, stage: int = COMPARED) -> list[Progress]:
    """Return nodes that have received so many bytes, and began at the time 0."""
    nodes = [Progress(rank, rank, rank - 1, stage=stage) for rank in range(len(received))]
    for node, size in zip(nodes, received, strict=True):
        node.begin(0.0)
        node.count(size, 0.0)
    return nodes


def test_node_gets_another_source_and_in_the_end_this_computer() -> None:
    nodes = chain(9, 9, 5)
    assert stalled(nodes, BYPASS - 1) == []
    assert stalled(nodes, BYPASS) == [(nodes[2], Stall.MOVE)]
    assert next_source(nodes[2], nodes) == 0
    nodes[2].moves = 1
    assert next_source(nodes[2], nodes) == LAPTOP
    nodes[2].source, nodes[2].progressed = LAPTOP, 0.0
    assert (nodes[2], Stall.GIVE_UP) in stalled(nodes, 2 * STALLED)


@pytest.mark.parametrize("stage", [WAITING, COMPARED])
def test_only_the_first_of_nodes_that_wait_for_each_other_is_at_fault(stage: int) -> None:
    nodes = chain(5, 5, 5, stage=stage)
    assert stalled(nodes, STALLED) == [(nodes[0], Stall.GIVE_UP)]
    assert nodes[2].progressed == STALLED


def test_node_whose_source_claims_to_have_everything_does_not_wait_for_it() -> None:
    nodes = chain(5, 5)
    nodes[0].ended = True
    assert stalled(nodes, BYPASS) == [(nodes[1], Stall.MOVE)]


def test_node_may_wait_longer_for_its_disk() -> None:
    nodes = chain(5, stage=WRITING)
    assert stalled(nodes, TO_DISK - 1) == []
    assert stalled(nodes, TO_DISK) == [(nodes[0], Stall.GIVE_UP)]


def test_nodes_that_share_the_link_of_this_computer_have_more_time() -> None:
    nodes = chain(5, 5, 5)
    for node in nodes:
        node.source = LAPTOP
    assert stalled(nodes, 3 * STALLED - 1) == []
    assert len(stalled(nodes, 3 * STALLED)) == 3


def test_progress_is_bytes_up_to_a_limit_and_further_stages() -> None:
    (node,) = chain(0, stage=WAITING)
    most = 4 * LEAST
    for now, event, progressed in (
        (1.0, ReceiveEvent(received=LEAST - 1), 0.0),
        (2.0, ReceiveEvent(received=LEAST), 2.0),
        (3.0, ReceiveEvent(worked=LEAST), 2.0),
        (4.0, ReceiveEvent(received=LEAST, worked=2 * LEAST), 4.0),
        (5.0, ReceiveEvent(stage=COMPARED), 5.0),
        (6.0, ReceiveEvent(stage=COMPARED), 5.0),
        (7.0, ReceiveEvent(received=1 << 60), 7.0),
        (8.0, ReceiveEvent(received=1 << 61), 7.0),
    ):
        node.take(event, now, most)
        assert node.progressed == progressed


def test_deleting_files_is_progress() -> None:
    (node,) = chain(0, stage=COMPARED)
    node.deletes = 2 * LEAST // FILE_WORK
    node.take(ReceiveEvent(worked=LEAST), 1.0, 0)
    node.take(ReceiveEvent(worked=2 * LEAST), 2.0, 0)
    node.take(ReceiveEvent(worked=3 * LEAST), 3.0, 0)
    assert node.progressed == 2.0


def test_work_does_not_prolong_the_time_to_the_disk() -> None:
    (node,) = chain(0, stage=WAITING)
    node.take(ReceiveEvent(stage=WRITING), 1.0, 1 << 60)
    node.take(ReceiveEvent(received=1 << 30, worked=1 << 30), 2.0, 1 << 60)
    assert node.progressed == 1.0


def test_number_of_reports_is_limited() -> None:
    reports = Reports(0.0)
    line = b"{}\n"
    assert len(list(reports.feed(MAX_REPORTS * line, 0.0))) == MAX_REPORTS
    with pytest.raises(ProtocolError, match="too many reports"):
        list(reports.feed(line, 0.0))


def test_reports_before_a_bad_one_count() -> None:
    feed = Reports(0.0).feed(b'{"received": 5}\nnot a report\n', 0.0)
    assert next(feed).received == 5
    with pytest.raises(ProtocolError):
        next(feed)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ((MAX_LINE + 1) * b"x", "too long"),
        (b"\n", "truncated"),
        ((MAX_NOTES + 1) * b'{"note": "x"}\n', "too many notes"),
    ],
    ids=["one line", "no report", "notes"],
)
def test_what_a_node_may_write_is_limited(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        list(Reports(0.0).feed(data, 0.0))


def test_reports_of_a_long_transfer_may_be_many() -> None:
    reports = Reports(0.0)
    for second in range(1000):
        assert len(list(reports.feed(2 * b'{"received": 1}\n', float(second)))) == 2

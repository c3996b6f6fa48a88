"""What a transfer does about what nodes report: which get the files from this computer, which are given up,
and which wait without a fault of their own."""

from __future__ import annotations

import pytest

from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.file_steps import COMPARED, LISTED, WAITING, WRITING, ReceiveEvent, ReceiveReply
from cloudddp.agent.protocol.manifest import Entry
from cloudddp.agent.protocol.transfer import Wants
from cloudddp.job.transfer import MAX_LINE, MAX_NOTES, Reports
from cloudddp.job.transfer_state import (
    BYPASS,
    CLOSING,
    STALLED,
    TO_DISK,
    Action,
    Close,
    GiveUp,
    NodeState,
    Note,
    Offer,
    Send,
    TransferState,
)

NO_PROGRESS = "it made no progress while files were sent to it"
ENTRIES = [("a", Entry("f", 0o644, 5, 1, "")), ("b", Entry("f", 0o644, 9 << 20, 1, ""))]
EVERYTHING = ReceiveEvent(wants=Wants(everything=True))
DONE = ReceiveEvent(done=ReceiveReply())


def star(*received: int, stage: int = COMPARED) -> TransferState:
    """Return a transfer to nodes that have received so many bytes, and began at the time 0."""
    state = TransferState(range(len(received)), ENTRIES)
    state.offer(state.first, 0.0)
    for rank, size in enumerate(received):
        state.begin(rank, 0.0)
        state.nodes[rank].received, state.nodes[rank].stage = size, stage
    return state


def moved(rank: int) -> list[Action]:
    return [Note(f"node {rank} receives nothing from its source; it uses another source"), Offer(rank)]


def test_node_that_gets_nothing_from_the_first_one_gets_the_files_from_this_computer() -> None:
    state = star(9, 9, 5)
    assert state.tick(BYPASS - 1) == []
    assert state.tick(BYPASS) == moved(2)
    assert GiveUp(2, NO_PROGRESS) in state.tick(BYPASS + 2 * STALLED)


@pytest.mark.parametrize("stage", [WAITING, COMPARED])
def test_only_the_first_of_nodes_that_wait_for_it_is_at_fault(stage: int) -> None:
    state = star(5, 5, 5, stage=stage)
    assert state.tick(STALLED - 1) == []
    assert state.tick(STALLED) == [GiveUp(0, NO_PROGRESS), *moved(1), *moved(2)]


def test_node_does_not_wait_for_a_first_one_that_claims_to_have_everything() -> None:
    state = star(5, 5)
    state.take(0, DONE, 0.0)
    assert state.tick(BYPASS) == moved(1)


def test_node_that_compares_its_files_keeps_its_source() -> None:
    state = star(9, 5)
    state.nodes[1].stage = LISTED
    state.nodes[0].progressed = STALLED
    assert state.tick(STALLED - 1) == []
    assert state.tick(STALLED) == [GiveUp(1, NO_PROGRESS)]


def test_node_may_wait_longer_for_its_disk() -> None:
    state = star(5, stage=WRITING)
    assert state.tick(TO_DISK - 1) == []
    assert state.tick(TO_DISK) == [GiveUp(0, NO_PROGRESS), Close()]


def test_nodes_that_share_the_link_of_this_computer_have_more_time() -> None:
    state = star(5, 5, 5)
    for rank in (1, 2):
        state.take(rank, ReceiveEvent(direct="x"), 0.0)
    assert state.tick(3 * STALLED - 1) == []
    assert len(state.tick(3 * STALLED)) == 4  # and Close


def test_busy_computer_gives_the_nodes_time() -> None:
    state = star(9, 5)
    state.restart_limits(BYPASS)
    assert state.tick(2 * BYPASS - 1) == []
    assert state.tick(2 * BYPASS) == moved(1)


def test_node_whose_step_has_not_begun_is_not_at_fault() -> None:
    assert TransferState([0, 1], ENTRIES).tick(10 * STALLED) == []


def test_node_that_asks_gets_the_files_from_this_computer_and_the_user_is_warned_once() -> None:
    state = star(0, 0, 0)
    reason = "node 0 cannot be reached"
    warning = f"warning: nodes cannot copy files from each other ({reason}); sending from this computer"
    asked = [state.take(rank, ReceiveEvent(direct=reason), 1.0) for rank in (1, 2)]
    assert asked[0] == [Note(f"node 1: {reason}"), Note(warning), Offer(1)]
    assert asked[1] == [Note(f"node 2: {reason}"), Offer(2)]
    assert state.take(1, EVERYTHING, 1.0) == [Send(1, [(0, 0), (1, 0)], Wants(everything=True))]


def test_node_that_was_moved_may_still_ask_once() -> None:
    state = star(9, 5)
    state.tick(BYPASS)
    assert Offer(1) not in state.take(1, ReceiveEvent(direct="x"), BYPASS)


def test_file_whose_beginning_was_wrong_is_sent_again_once() -> None:
    state = star(0)
    state.take(0, ReceiveEvent(wants=Wants(files=(1,), offsets={"1": 7})), 1.0)
    assert state.take(0, ReceiveEvent(again=(1,)), 1.0) == [Send(0, [(1, 0)])]
    with pytest.raises(ProtocolError, match="sent as a whole"):
        state.take(0, ReceiveEvent(again=(1,)), 1.0)


def test_last_node_that_is_done_ends_the_steps_of_all() -> None:
    state = star(0, 0)
    assert state.take(0, DONE, 1.0) == []
    assert state.take(1, DONE, 2.0) == [Close()]
    assert state.finish(1, 3.0) == []
    assert state.tick(2.0 + CLOSING - 0.1) == []
    assert state.tick(2.0 + CLOSING) == [GiveUp(0, f"its step did not end within {CLOSING:g} s")]
    with pytest.raises(ProtocolError, match="its step goes on"):
        state.take(0, ReceiveEvent(), 60.0)


def test_progress_is_more_bytes_and_further_stages() -> None:
    node = NodeState(0)
    for now, event, progressed in (
        (1.0, ReceiveEvent(), 0.0),
        (2.0, ReceiveEvent(received=1), 2.0),
        (3.0, ReceiveEvent(received=1), 2.0),
        (4.0, ReceiveEvent(received=1, worked=1), 4.0),
        (5.0, ReceiveEvent(stage=COMPARED), 5.0),
        (6.0, ReceiveEvent(stage=COMPARED), 5.0),
        (7.0, ReceiveEvent(stage=WRITING), 7.0),
        (8.0, ReceiveEvent(received=1 << 30, worked=1 << 30), 7.0),  # its disk has a limit of its own
    ):
        node.count(event, now)
        assert node.progressed == progressed


def test_reports_before_a_bad_one_count() -> None:
    feed = Reports().feed(b'{"received": 5}\nnot a report\n')
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
        list(Reports().feed(data))

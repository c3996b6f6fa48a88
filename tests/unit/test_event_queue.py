"""The queue between the nodes' threads and the follower: bounded, and nothing is lost by an interrupt."""

from __future__ import annotations

import threading
import time

from support.harness import wait_for

from cloudddp.job.follow.events import EventQueue, NodeQuiet


def test_event_is_returned_until_the_next_one_is_requested() -> None:
    queue = EventQueue()
    queue.put(NodeQuiet(0))
    queue.put(NodeQuiet(1))
    assert [queue.get(0, 0.0), queue.get(0, 0.0)] == [NodeQuiet(0), NodeQuiet(0)]
    assert [queue.get(1, 0.0), queue.get(1, 0.0)] == [NodeQuiet(1), NodeQuiet(1)]
    assert queue.get(2, 0.0) is None


def test_reader_is_woken_up() -> None:
    queue = EventQueue()
    threading.Timer(0.1, lambda: queue.put(NodeQuiet(0))).start()
    began = time.monotonic()
    while queue.get(0, 10.0) is None:
        pass
    assert time.monotonic() - began < 5


def test_full_queue_blocks_the_writer() -> None:
    queue = EventQueue(capacity=4)
    written: list[int] = []

    def write() -> None:
        for number in range(50):
            queue.put(NodeQuiet(number))
            written.append(number)

    threading.Thread(target=write, daemon=True).start()
    wait_for(lambda: len(written) == 4, "the queue is full")
    assert queue.backlogged
    for number in range(50):
        while (event := queue.get(number, 1.0)) is None:
            pass
        assert event == NodeQuiet(number)
        assert len(written) <= number + 5
    assert queue.get(50, 0.0) is None
    assert not queue.backlogged


def test_events_of_many_writers_all_arrive() -> None:
    queue = EventQueue(capacity=8)
    writers = [
        threading.Thread(target=lambda w=writer: [queue.put(NodeQuiet(w * 100 + n)) for n in range(100)])
        for writer in range(8)
    ]
    for writer in writers:
        writer.start()
    found = []
    for number in range(800):
        while (event := queue.get(number, 1.0)) is None:
            pass
        assert isinstance(event, NodeQuiet)
        found.append(event.node)
    assert sorted(found) == list(range(800))
    for start in range(0, 800, 100):  # each writer's own order is kept
        own = [node for node in found if start <= node < start + 100]
        assert own == sorted(own)


def test_closed_queue_holds_up_no_writer() -> None:
    """The thread that reads from all nodes puts events: it must go on when nobody reads them any more."""
    events = EventQueue(capacity=1)
    events.put(NodeQuiet(0))
    blocked = threading.Thread(
        target=lambda: [events.put(NodeQuiet(number)) for number in range(1, 5)], daemon=True
    )
    blocked.start()
    blocked.join(0.2)
    assert blocked.is_alive()
    events.close()
    blocked.join(60)
    assert not blocked.is_alive()

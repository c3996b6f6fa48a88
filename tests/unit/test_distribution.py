"""From where each node gets what it lacks, what a node may report, and when files are compressed."""

from __future__ import annotations

import os
import zlib

import pytest

from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.sharing import rounds
from cloudddp.agent.protocol.transfer import PLAIN, ZLIB, Wants
from cloudddp.job.distribution import DIRECT, HERE, Distribution
from cloudddp.job.transfer import MAX_LINE, MAX_NOTES, MEASURED, Compression, Reports

NOTHING, MUCH = Wants(), Wants((0,), size=DIRECT + 1)


def begun(*wants: Wants) -> Distribution:
    """Return the distribution to nodes that lack this, before any gets something."""
    found = Distribution(range(len(wants)))
    for node, one in enumerate(wants):
        assert found.due() == {}, "all nodes answer first"
        found.answered(node, one)
    return found


def rounds_of(found: Distribution) -> list[dict[int, int]]:
    """Return what is sent in each round, if all nodes of a round take the same time."""
    done = []
    while due := found.due():
        done.append(due)
        for node in due:
            found.complete(node, serves=True)
    return done


@pytest.mark.parametrize(("nodes", "count"), [(2, 1), (5, 1), (6, 2), (8, 2), (25, 2), (64, 3), (125, 3)])
def test_each_byte_leaves_this_computer_once_and_nodes_copy_in_rounds(nodes: int, count: int) -> None:
    first, *others = rounds_of(begun(*[MUCH] * nodes))
    assert first == {0: HERE}
    assert others == rounds([0], range(1, nodes))
    assert len(others) == count


@pytest.mark.parametrize(
    ("wants", "expected"),
    [
        ([MUCH], [{0: HERE}]),
        ([NOTHING, MUCH, NOTHING], [{0: HERE, 2: HERE}, {1: 0}]),
        ([MUCH, Wants((0,), size=5)], [{1: HERE}, {0: 1}]),
        ([Wants((0,), size=1000)] * 3, [{0: HERE, 1: HERE, 2: HERE}]),
        ([NOTHING, Wants((0,), size=1000)], [{0: HERE, 1: HERE}]),
    ],
    ids=["one node", "complete ones", "the least", "little", "little of one"],
)
def test_who_gets_what_from_whom(wants: list[Wants], expected: list[dict[int, int]]) -> None:
    assert rounds_of(begun(*wants)) == expected


def test_node_whose_source_fails_gets_its_files_from_here() -> None:
    found = begun(MUCH, MUCH, MUCH)
    assert found.due() == {0: HERE}
    found.complete(0, serves=True)
    assert found.due() == {1: 0, 2: 0}
    assert found.copied(1) == MUCH.size
    found.answered(1, MUCH)
    assert found.due() == {1: HERE}
    assert found.copied(1) == 0


@pytest.mark.parametrize("end", ["gone", "serves nobody"])
def test_next_node_gets_its_files_from_here_where_the_first_one_serves_nobody(end: str) -> None:
    found = begun(MUCH, MUCH, MUCH)
    assert found.due() == {0: HERE}
    assert found.due() == {}
    if end == "gone":
        found.gone(0)
    else:
        found.complete(0, serves=False)
    assert found.due() == {1: HERE}
    found.complete(1, serves=True)
    assert found.due() == {2: 1}


def test_node_that_ends_before_it_has_answered_is_not_waited_for() -> None:
    found = Distribution([0, 1])
    found.answered(1, MUCH)
    found.gone(0)
    assert found.due() == {1: HERE}


# -- reports -------------------------------------------------------------------------------------------------


def test_reports_before_a_bad_one_count() -> None:
    feed = Reports().feed(b'{"port": 5}\nnot a report\n')
    assert next(feed).port == 5
    with pytest.raises(ProtocolError):
        next(feed)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ((MAX_LINE + 1) * b"x", "too long"),
        (b"\n", "truncated"),
        ((MAX_NOTES + 1) * b'{"note": "x"}\n', "too many notes"),
        ((MAX_NOTES + 1) * b'{"lost": "x"}\n', "too many notes"),
    ],
    ids=["one line", "no report", "notes", "lost"],
)
def test_what_a_node_may_write_is_limited(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        list(Reports().feed(data))


# -- when files are compressed on their way to the nodes -----------------------------------------------------


TEXT = b"for step in range(1000): optimizer.step()\n" * 20_000


@pytest.mark.parametrize(
    ("rates", "data", "codec"),
    [
        ([], TEXT, PLAIN),  # it was not measured
        ([25e6], TEXT, ZLIB),  # 200 Mbit/s
        ([125e6], TEXT, PLAIN),  # 1 Gbit/s
        ([25e6], os.urandom(1 << 18), PLAIN),
        ([1e12] * 16 + [1e6] * 64, TEXT, ZLIB),  # a buffer on the way has taken the first bytes at once
        ([25e6], b"", PLAIN),
    ],
    ids=["unknown", "slow", "fast", "random", "buffer", "nothing"],
)
def test_what_is_compressed(rates: list[float], data: bytes, codec: int) -> None:
    compression = Compression()
    for rate in rates:
        compression.measure(MEASURED, MEASURED / rate)
    found, encoded = compression.encode(data)
    assert found == codec
    assert (zlib.decompress(encoded) if codec == ZLIB else encoded) == data

"""What is copied between the nodes before ranks start, in which rounds, and which paths a node may report.
In a sync: from where each node gets what it lacks, what it may report, and when files are compressed."""

from __future__ import annotations

import os
import zlib
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.sharing import (
    WIDTH,
    Copy,
    Offered,
    SharedFiles,
    SnapshotSearch,
    copies,
    differing,
    matches,
    next_sources,
    refusal,
    rounds,
)
from cloudddp.agent.protocol.transfer import PLAIN, ZLIB
from cloudddp.config.spec import JobSpec
from cloudddp.job.distribution import DIRECT, HERE, Distribution
from cloudddp.job.start_ranks import snapshot_search
from cloudddp.job.transfer import MAX_LINE, MAX_NOTES, MEASURED, Compression, Reports

A1, A2, B1 = Offered("a", 1, 5), Offered("a", 2, 5), Offered("b", 1, 5)
FROM_0, FROM_1, FROM_9 = (Offered("a", 1, 5, f"i-{node}") for node in (0, 1, 9))
Found = tuple[str, int, tuple[int, ...], tuple[int, ...]]  # a file and its time, its holders, who lacks it


def found(offered: list[list[Offered]], **how: bool) -> list[Found]:
    offers = {node: SharedFiles(tuple(files)) for node, files in enumerate(offered)}
    planned = copies(offers, {node: f"i-{node}" for node in offers}, **how)
    for one in planned:
        assert one.file.origin == f"i-{one.holders[0]}", "it counts as its writer"
    return [(one.file.path, one.file.mtime_ns, one.holders, one.lacking) for one in planned]


@pytest.mark.parametrize(
    ("offered", "copied"),
    [
        ([[], []], []),
        ([[A1], [A1]], []),
        ([[A1], []], [("a", 1, (0,), (1,))]),
        ([[A1], [A2]], [("a", 2, (1,), (0,))]),
        ([[A2], [B1]], [("a", 2, (0,), (1,)), ("b", 1, (1,), (0,))]),
        ([[A1, B1], [A1], []], [("a", 1, (0, 1), (2,)), ("b", 1, (0,), (1, 2))]),
    ],
)
def test_newest_version_goes_to_the_nodes_that_lack_it(
    offered: list[list[Offered]], copied: list[Found]
) -> None:
    assert found(offered, every=True, replaces=True) == copied
    assert found(offered, every=False, replaces=True) == copied[:1]


@pytest.mark.parametrize(
    ("offered", "copied"),
    [
        ([[A1], []], [("a", 1, (0,), (1,))]),
        ([[A1], [A2]], []),  # each has its own
        ([[A1], [A2], []], [("a", 2, (1,), (2,))]),
        ([[A1], [FROM_0]], []),  # the copy is of this version
        ([[A1], [FROM_0], []], [("a", 1, (0, 1), (2,))]),
        ([[A2], [FROM_0]], [("a", 2, (0,), (1,))]),
        ([[], [FROM_0], []], []),  # node 0 has deleted it
        ([[], [FROM_9], []], [("a", 1, (1,), (0, 2))]),  # its writer is gone
        ([[], [FROM_9], [FROM_9]], [("a", 1, (1, 2), (0,))]),
        ([[A1, B1], [FROM_0], []], [("a", 1, (0, 1), (2,)), ("b", 1, (0,), (1, 2))]),
        ([[A2], [FROM_9]], [("a", 2, (0,), (1,))]),  # the new writer's is newer
    ],
)
def test_default_copies_to_nodes_that_have_no_version_of_their_own(
    offered: list[list[Offered]], copied: list[Found]
) -> None:
    assert found(offered, every=True, replaces=False) == copied


def test_named_files_count_whoever_wrote_them_and_versions_that_nodes_wrote_themselves_differ() -> None:
    offers = {0: SharedFiles(()), 1: SharedFiles((FROM_0,))}
    planned = copies(offers, {0: "i-0", 1: "i-1"}, every=True, replaces=True)
    assert planned == [Copy(FROM_0, (1,), (0,))], "and the copy is still that of node 0"
    offers = {0: SharedFiles((A1, B1)), 1: SharedFiles((A2, B1)), 2: SharedFiles((FROM_1,))}
    assert differing(offers) == ["a"]


@pytest.mark.parametrize(
    ("holders", "nodes", "sizes"),
    [([0], 2, [1]), ([0], 8, [4, 3]), ([0], 64, [4, 20, 39]), ([1, 2, 3], 64, [12, 49]), ([], 2, [])],
)
def test_each_node_that_has_them_serves_others(holders: list[int], nodes: int, sizes: list[int]) -> None:
    lacking = [node for node in range(nodes) if node not in holders]
    planned = rounds(holders, lacking)
    assert [len(one) for one in planned] == sizes
    have = set(holders)
    for sources in planned:
        served = list(sources.values())
        assert max(map(served.count, served)) <= WIDTH
        assert have.issuperset(served)
        assert have.isdisjoint(sources)
        # So nodes that wait for the one that serves them never wait in a circle.
        assert all(source < node for node, source in sources.items() if source not in holders)
        have |= sources.keys()
    assert not holders or have == {*holders, *lacking}


def test_least_busy_holder_serves_first() -> None:
    assert next_sources({0: 3, 7: 0, 5: 0, 9: WIDTH}, [4, 2, 3, 1]) == {4: 5, 2: 7, 3: 5, 1: 7}
    assert next_sources({0: 3}, [1, 2]) == {1: 0}


@pytest.mark.parametrize(
    ("path", "mtime_ns", "why"),
    [
        ("runs/new.bin", 5, ""),
        ("train.py", 5, "'train.py' is no snapshot of this job"),
        ("runs/base.bin", 5, "'runs/base.bin' is no snapshot of this job"),
        ("runs/new.bin", 7, "the time of 'runs/new.bin' is more than a day in the future"),
    ],
)
def test_reason_to_refuse_a_snapshot(path: str, mtime_ns: int, why: str) -> None:
    search = SnapshotSearch("p", ("runs/**/*.bin", "runs/*.pt"), ("runs/base.bin",))
    assert refusal(Offered(path, mtime_ns), search, latest_ns=6) == why


@pytest.mark.parametrize(
    ("job", "shared", "every"),
    [
        (
            JobSpec(share=("out",)),
            {"out/a": True, "out/b/c": True, "train.py": False, "x/out/a": False},
            True,
        ),
        (JobSpec(share=("out/**", "s.pt")), {"out/b/c": True, "s.pt": True, "t.pt": False}, True),
        (JobSpec(snapshots=("*.pt",)), {"s.pt": True, "out/s.pt": False}, False),
        (JobSpec(snapshots=("*.pt",), share=("out",)), {"s.pt": False, "out/s.pt": True}, True),
    ],
)
def test_settings_name_what_is_shared(job: JobSpec, shared: dict[str, bool], every: bool) -> None:
    found = snapshot_search(job, ("train.py",), nodes=2, wrote=False)
    assert found is not None
    assert {name: matches(name, found.patterns) for name in shared} == shared
    assert found.every is every
    assert snapshot_search(JobSpec(), ("train.py",), nodes=2, wrote=False) is None


@pytest.mark.parametrize(
    ("job", "nodes", "wrote", "restarts_only"),
    [
        (JobSpec(), 2, False, None),
        (JobSpec(), 1, True, False),
        (JobSpec(), 2, True, False),
        (JobSpec(retries=1), 2, False, True),
        (JobSpec(retries=1), 2, True, False),
        (JobSpec(share_mb=0, retries=1), 2, True, False),
        (JobSpec(share_mb=1e-9), 2, True, False),
    ],
)
def test_what_only_some_nodes_wrote_is_shared_by_default(
    job: JobSpec, nodes: int, wrote: bool, restarts_only: bool | None
) -> None:
    found = snapshot_search(job, (), nodes=nodes, wrote=wrote)
    assert (None if found is None else found.restarts_only) is restarts_only
    assert found is None or found.patterns == ()
    limit = max(1, int(job.share_mb * 2**20)) if nodes > 1 and job.share_mb else 0  # else nothing is copied
    assert found is None or found.limit == limit


NOTHING, MUCH = 0, DIRECT + 1  # bytes


def begun(*lacking: int) -> Distribution:
    """Return the distribution to nodes that lack this, before any gets something."""
    found = Distribution(range(len(lacking)))
    for node, one in enumerate(lacking):
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
    ("lacking", "expected"),
    [
        ([MUCH], [{0: HERE}]),
        ([NOTHING, MUCH, NOTHING], [{0: HERE, 2: HERE}, {1: 0}]),
        ([MUCH, 5], [{1: HERE}, {0: 1}]),
        ([1000] * 3, [{0: HERE, 1: HERE, 2: HERE}]),
        ([NOTHING, 1000], [{0: HERE, 1: HERE}]),
    ],
    ids=["one node", "complete ones", "the least", "little", "little of one"],
)
def test_who_gets_what_from_whom(lacking: list[int], expected: list[dict[int, int]]) -> None:
    assert rounds_of(begun(*lacking)) == expected


def test_node_whose_source_fails_gets_its_files_from_here() -> None:
    found = begun(MUCH, MUCH, MUCH)
    assert found.due() == {0: HERE}
    found.complete(0, serves=True)
    assert found.due() == {1: 0, 2: 0}
    assert found.copied(1) == MUCH
    found.answered(1, MUCH)
    assert found.due() == {1: HERE}
    assert found.copied(1) == 0


def test_next_node_gets_its_files_from_here_where_the_first_one_serves_nobody() -> None:
    """Or has gone; and a node that ends before it has answered is not waited for."""
    for end in (Distribution.gone, partial(Distribution.complete, serves=False)):
        found = begun(MUCH, MUCH, MUCH)
        assert (found.due(), found.due()) == ({0: HERE}, {})
        end(found, 0)
        assert found.due() == {1: HERE}
        found.complete(1, serves=True)
        assert found.due() == {2: 1}
    found = Distribution([0, 1])
    found.answered(1, MUCH)
    found.gone(0)
    assert found.due() == {1: HERE}


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
    reports = Reports()
    assert [one.port for one in reports.feed(b'{"port": 5}\n')] == [5]
    with pytest.raises(ProtocolError, match=why):
        list(reports.feed(data))
    feed = Reports().feed(b'{"port": 5}\nnot a report\n')
    assert next(feed).port == 5, "reports before a bad one count"


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


@pytest.mark.parametrize(
    ("path", "patterns", "expected"),
    [
        ("runs/1/a.pt", ["runs/**/*.pt"], True),
        ("runs/a.pt", ["runs/**/*.pt"], True),
        ("./runs/a.pt", ["runs/*.pt"], False),
        ("runs/1/a.pt", ["runs/*.pt"], False),
        ("runs/a.pt", ["./runs//*.pt"], True),
        ("script.py", ["runs/**/*.pt", "*.pt"], False),
        ("runs/../script.py", ["runs/*.py"], False),
        ("a/b/c", ["**"], True),
        ("a.pt", ["[!a].pt"], False),
        ("/".join("a" * 2000), ["**/a/" * 30 + "b"], False),
    ],
)
def test_path(path: str, patterns: list[str], expected: bool) -> None:
    assert matches(path, patterns) is expected


@given(
    st.lists(st.sampled_from(["a", "b.pt", ".c"]), min_size=1, max_size=4),
    st.lists(st.sampled_from(["a", "**", "*", "*.pt", "?"]), min_size=1, max_size=4),
)
def test_paths_that_a_node_finds_match(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], words: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("p")
    file = folder.joinpath(*parts)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    pattern = "/".join(words)
    if file in set(folder.glob(pattern)):
        assert matches("/".join(parts), [pattern]), (pattern, Path(*parts))

"""What is copied between the nodes before ranks start, in which rounds, and which paths a node may report."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudddp.agent.protocol.sharing import (
    WIDTH,
    Copy,
    Offer,
    Offered,
    SnapshotSearch,
    copies,
    differing,
    matches,
    next_sources,
    refusal,
    rounds,
)
from cloudddp.config.spec import JobSpec
from cloudddp.job.start_ranks import looking_for

A1, A2, B1 = Offered("a", 1, 5), Offered("a", 2, 5), Offered("b", 1, 5)
FROM_0, FROM_1, FROM_9 = (Offered("a", 1, 5, f"i-{node}") for node in (0, 1, 9))
Found = tuple[str, int, tuple[int, ...], tuple[int, ...]]  # a file and its time, its holders, who lacks it


def found(offered: list[list[Offered]], **how: bool) -> list[Found]:
    offers = {node: Offer(tuple(files)) for node, files in enumerate(offered)}
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


def test_named_files_count_whoever_wrote_them() -> None:
    offers = {0: Offer(()), 1: Offer((FROM_0,))}
    planned = copies(offers, {0: "i-0", 1: "i-1"}, every=True, replaces=True)
    assert planned == [Copy(FROM_0, (1,), (0,))], "and the copy is still that of node 0"


def test_versions_that_nodes_wrote_themselves_differ() -> None:
    offers = {0: Offer((A1, B1)), 1: Offer((A2, B1)), 2: Offer((FROM_1,))}
    assert differing(offers) == ["a"]


@pytest.mark.parametrize(
    ("holders", "nodes", "sizes"),
    [
        ([0], 1, []),
        ([0], 2, [1]),
        ([0], 8, [4, 3]),
        ([0], 64, [4, 20, 39]),
        ([5], 64, [4, 20, 39]),
        ([1, 2, 3], 64, [12, 49]),
        ([], 2, []),
    ],
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
    found = looking_for(job, ("train.py",), nodes=2, wrote=False)
    assert found is not None
    assert {name: matches(name, found.patterns) for name in shared} == shared
    assert found.every is every
    assert looking_for(JobSpec(), ("train.py",), nodes=2, wrote=False) is None


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
    found = looking_for(job, (), nodes=nodes, wrote=wrote)
    assert (None if found is None else found.restarts_only) is restarts_only
    assert found is None or found.patterns == ()
    limit = max(1, int(job.share_mb * 2**20)) if nodes > 1 and job.share_mb else 0  # else nothing is copied
    assert found is None or found.limit == limit


# -- paths ---------------------------------------------------------------------------------------------------


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

"""Bandwidth between nodes: the schedule of pairs, what ranks print, which node is slow. Versions of nodes."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

import bandwidth
from cloudddp.cli.actions import preflight as shown
from cloudddp.cli.actions.trial import versions
from cloudddp.job import preflight
from cloudddp.job.preflight import Measured


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 16])
def test_every_pair_is_measured_once_in_rounds_of_disjoint_pairs(nodes: int) -> None:
    rounds = bandwidth.rounds(nodes)
    assert sorted(pair for one in rounds for pair in one) == list(combinations(range(nodes), 2))
    for one in rounds:
        busy = [node for pair in one for node in pair]
        assert len(busy) == len(set(busy)) >= nodes - 1 - nodes % 2
    assert len(rounds) <= nodes


def found(nodes: int, slow: dict[int, float], usual: float = 10e9) -> list[Measured]:
    """Return what was measured where some nodes have less than the usual bandwidth, in parts of it."""
    pairs = [
        Measured(pair, usual * min(slow.get(node, 1.0) for node in pair))
        for pair in combinations(range(nodes), 2)
    ]
    return pairs if nodes == 2 else [*pairs, Measured(tuple(range(nodes)), usual)]


@pytest.mark.parametrize(
    ("nodes", "slow", "expected"),
    [
        (8, {}, {}),
        (3, {1: 0.2}, {1: 0.2}),
        (5, {0: 0.5, 3: 0.6}, {0: 0.5, 3: 0.6}),
        (6, {2: 0.75}, {}),
        (2, {1: 0.1}, {}),
        (1, {}, {}),
    ],
)
def test_slow_nodes_have_no_fast_pair(nodes: int, slow: dict[int, float], expected: dict[int, float]) -> None:
    assert preflight.slow_nodes(found(nodes, slow)) == pytest.approx(expected)


def test_lines_of_ranks_are_decoded_and_bounded() -> None:
    fine = {"nodes": [1, 2], "bus": 1e9}
    line = preflight.MARK + json.dumps(fine)
    assert preflight.read(line) == Measured((1, 2), 1e9)
    assert preflight.MARK == bandwidth.MARK
    assert preflight.read("epoch 1") is None
    for wrong in ({"bus": -1}, {"bus": "1"}, {"bus": 1e16}, {"nodes": ["0"]}, {"nodes": None}, {"more": 1}):
        assert preflight.read(preflight.MARK + json.dumps(fine | wrong)) is None
    assert preflight.read(preflight.MARK + "[" * 100_000) is None


def test_table_has_80_columns_and_the_slowest_pairs_of_many() -> None:
    lines = shown.measured_table(found(32, {7: 0.25})).splitlines()
    assert len(lines) == 1 + shown.SHOWN + 1
    assert max(map(len, lines)) <= 80
    assert all("7" in line.split()[0].split("-") for line in lines[1 : 1 + shown.SHOWN])
    assert lines[1].split()[1:] == ["2.50"]
    assert lines[-1].split() == ["all", "10.00"]


# -- what a node prints about its versions, line by line: the report of a trial is meant to be shown ---------


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (b"os=ubuntu 24.04\nkernel=6.14.0-1012-aws\n", {"os": "ubuntu 24.04", "kernel": "6.14.0-1012-aws"}),
        (b"driver=\npython=Python 3.12.3", {"python": "Python 3.12.3"}),
        (b"hostname=ip-172-31-0-4\nsecret=x\n", {}),
        (b"os=\x1b[31mred\nssh=" + b"x" * 121, {}),
        (b"welcome to bash\nsystemd=systemd 257 (257.13-1)", {"systemd": "systemd 257 (257.13-1)"}),
        (b"os=\xff\xfe", {}),
        (b"programs= aws\n/me=x\n/opt/pytorch=mode 755", {"programs": "aws", "/opt/pytorch": "mode 755"}),
        (b"group docker=no\nmodules of python3=none", {"group docker": "no", "modules of python3": "none"}),
    ],
)  # fmt: skip
def test_only_known_lines_are_taken(output: bytes, expected: dict[str, str]) -> None:
    assert versions(output) == expected

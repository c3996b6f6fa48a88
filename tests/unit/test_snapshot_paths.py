"""Which paths a node may report as its newest snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudddp.agent.protocol.snapshots import matches


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

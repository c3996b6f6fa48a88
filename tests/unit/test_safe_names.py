"""Names of results: which were requested, where a link ends, and what git or cloudddp would act on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudddp.agent.protocol.manifest import link_end
from cloudddp.job.results import safe_names


@pytest.mark.parametrize(
    ("names", "paths"),
    [
        (["runs"], (("runs",),)),
        (["runs/", "./runs", "runs/a"], (("runs",),)),
        (["runs/a", "runs/b", "runs-2"], (("runs-2",), ("runs", "a"), ("runs", "b"))),
        (["."], ((),)),
        (["runs", "."], ((),)),
        (["-x", "a b"], (("-x",), ("a b",))),
    ],
)
def test_requested_names(names: list[str], paths: Any) -> None:
    assert set(safe_names.requested(names)) == set(paths)


@pytest.mark.parametrize("name", ["", "/etc", "~/x", "..", "runs/../../x", "runs/../x", "a\0b"])
def test_names_outside_the_project_are_refused(name: str) -> None:
    with pytest.raises(ValueError) as refused:
        safe_names.requested(["runs", name])
    assert refused.value.args == (name,)


@pytest.mark.parametrize(
    ("at", "target", "end"),
    [
        ("runs/l", "a", "runs/a"),
        ("runs/l", "./a//b/", "runs/a/b"),
        ("runs/x/l", "../a", "runs/a"),
        ("runs/x/l", "..", "runs"),
        ("runs/x/l", "../..", ""),
        ("runs/x/l", "../../..", None),
        ("runs/l", "a/../b", None),
        ("runs/l", "a/..", None),
        ("runs/l", "/etc", None),
        ("runs/l", "", None),
        ("l", "..", None),
        ("l", "x", "x"),
    ],
)
def test_link_end(at: str, target: str, end: str | None) -> None:
    found = link_end(tuple(at.split("/")), target)
    assert found == (None if end is None else tuple(end.split("/")) if end else ())


@given(st.text(max_size=12))
def test_git_folder_is_guarded_in_any_spelling(noise: str) -> None:
    ignored = "".join(c for c in noise if safe_names.unicodedata.category(c) in ("Cf", "Cc", "Mn"))
    assert safe_names.guarded(".g" + ignored + "iT. ")
    assert safe_names.guarded(".cloudddp" + noise)
    assert safe_names.guarded("cloudddp-" + ignored + "LOGS")

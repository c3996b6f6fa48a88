"""[[data]]: where it is in the project, its variable, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloudddp.config import settings
from cloudddp.config.settings import Layer
from cloudddp.config.spec import Config
from cloudddp.errors import UsageError
from cloudddp.job import project_files

ROLE = {"cluster": {"instance_profile": "nodes"}}


def resolved(*data: dict[str, Any], **more: Any) -> Config:
    return settings.resolve([Layer("file", {"data": list(data), **more})])


@pytest.mark.parametrize(
    ("data", "place", "variable"),
    [
        ({"source": "data"}, "data", "CLOUDDDP_DATA_DATA"),
        ({"source": "./sets/a-b/"}, "sets/a-b", "CLOUDDDP_DATA_SETS_A_B"),
        ({"source": "~/datasets/digits"}, "digits", "CLOUDDDP_DATA_DIGITS"),
        ({"source": "/mnt/sets"}, "sets", "CLOUDDDP_DATA_SETS"),
        ({"source": "../beside"}, "beside", "CLOUDDDP_DATA_BESIDE"),
        ({"source": "data", "path": "in/here"}, "in/here", "CLOUDDDP_DATA_IN_HERE"),
        ({"source": "s3://bucket/a/b/"}, "b", "CLOUDDDP_DATA_B"),
        ({"source": "s3://bucket"}, "bucket", "CLOUDDDP_DATA_BUCKET"),
    ],
)
def test_where_data_is(data: dict[str, Any], place: str, variable: str) -> None:
    (found,) = resolved(data, **ROLE).data
    assert (found.place, found.variable) == (place, variable)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([{"source": ".."}], "has no path in the project"),
        ([{"source": "../.."}], "has no path in the project"),
        ([{"source": "."}], "has no path in the project"),
        ([{"source": "/"}], "has no path in the project"),
        ([{"source": "~"}], "has no path in the project"),
        ([{"source": "data", "path": "../up"}], "path"),
        ([{"source": "data", "path": "/abs"}], "path"),
        ([{"source": "\u65e5\u672c"}], "no letter or digit"),
        ([{"source": "a"}, {"source": "a"}], "overlaps the path a"),
        ([{"source": "a"}, {"source": "a/b"}], "overlaps the path a"),
        ([{"source": "a-b"}, {"source": "a_b"}], "has the same variable as a-b, CLOUDDDP_DATA_A_B"),
        ([{"path": "x"}], "[[data]] has no source"),
        ([{"source": "a", "mode": "mount"}], "mode"),
        ([{"source": "s3://bucket/../x"}], "source"),
        ([{"source": "s3:/bucket"}], "source"),
        ([{"source": "s3://bucket/x"}], "needs cluster.instance_profile"),
    ],
)
def test_data_that_cannot_be_sent_is_refused(data: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolved(*data)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("source", "why"), [("missing", "is not a folder"), ("file.py", "is not a folder"), ("~", "no path")]
)
def test_source_that_is_no_folder_of_data_is_refused(tmp_path: Path, source: str, why: str) -> None:
    (tmp_path / "file.py").touch()
    with pytest.raises(UsageError) as caught:
        project_files.of_config(tmp_path, resolved({"source": source}))
    assert why in str(caught.value)


def test_home_folder_is_refused_under_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    with pytest.raises(UsageError) as caught:
        project_files.of_config(tmp_path, resolved({"source": "~", "path": "everything"}))
    assert "home" in str(caught.value)

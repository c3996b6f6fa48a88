"""[[data]]: where it is in the project, its variable, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import file_modes

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
        ([{"source": "results"}], "overlaps results, where jobs write results"),
        ([{"source": "runs/old"}], "overlaps runs, where jobs write results"),
        ([{"source": "data", "path": ".git/hooks"}], "overlaps .git"),
        ([{"source": "data", "path": "cloudddp.toml"}], "overlaps cloudddp.toml"),
        ([{"source": f"set{n}"} for n in range(51)], "51 times [[data]], and at most 50"),
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


def test_data_in_a_folder_of_results_is_refused() -> None:
    with pytest.raises(UsageError, match=r"overlaps data/out, where jobs write results"):
        resolved({"source": "data"}, job={"outputs": ["data/out"]})
    assert resolved({"source": "runs"}, job={"outputs": ["out"]}).data[0].place == "runs"


def test_user_that_does_not_exist_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    with pytest.raises(UsageError, match="is not a folder"):
        project_files.of_config(tmp_path, resolved({"source": "~no-such-user/x"}))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a package named src, beside a folder of data of that name."""
    for name in ("project/src/lib.py", "project/train.py", "outside/src/x.bin", "outside/src/prod.vars"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path / "project"


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"source": "../outside/src"}, "src/lib.py"),
        ({"source": "../outside", "path": "train.py"}, "train.py"),
        ({"source": "../outside", "path": "train.py/deeper"}, "train.py"),
        ({"source": "s3://bucket/src"}, "src/lib.py"),
    ],
)
def test_data_never_takes_the_place_of_files_of_the_project(
    project: Path, data: dict[str, str], name: str
) -> None:
    with pytest.raises(UsageError) as caught:
        project_files.of_config(project, resolved(data, **ROLE))
    assert f"where the project has {name}" in str(caught.value)


def test_every_file_of_a_folder_is_sent_but_secrets(project: Path) -> None:
    config = resolved({"source": "../outside/src", "path": "sets"}, {"source": "src"})
    secret = project.parent / "outside/src/prod.vars"
    found = project_files.of_config(project, config, secret_files=iter([secret]))
    assert set(found.manifest) == {"src/lib.py", "train.py", "sets/x.bin"}
    assert found.withheld == ("sets/prod.vars",)
    assert found.locate("sets/x.bin") == str(project / "../outside/src/x.bin")


def test_folder_that_cannot_be_read_is_named(project: Path) -> None:
    locked = project.parent / "outside/src/locked"
    locked.mkdir(mode=0)
    config = resolved({"source": "../outside/src", "path": "sets"})
    with pytest.raises(UsageError, match=r"cannot read .*locked"):
        file_modes.applied_to(lambda: project_files.of_config(project, config))
    locked.chmod(0o700)  # so that pytest can remove it

"""What `down` and the verbs that only look use of a broken configuration: the name has to be certain."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudddp.config import tolerant
from cloudddp.config.settings import Layer
from cloudddp.errors import UsageError

NO_FILE: tuple[Path, ...] = ()


def name(environ: dict[str, str], files: tuple[Path, ...]) -> str:
    """Return the name of the cluster, where at least one error was reported."""
    errors: list[UsageError] = []
    default = Layer("folder", {"cluster": {"name": "default"}})
    found = tolerant.resolve([], environ, files, errors.append, named=True, default=default)
    assert errors
    return found.cluster.name


@pytest.mark.parametrize(
    "broken",
    [
        "max_huors = 2",
        "[clutser]\nnodes = 2",
        'nodes = "many"',
        'proxy_jump = "a@b"\nproxy_command = "nc %h %p"',
        "nodes = ",
        "# \udcff",
    ],
)
def test_name_in_a_file_that_is_broken_elsewhere_is_used(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "cloudddp.toml"
    path.write_bytes(f'[cluster]\nname = "mine"\n{broken}\n'.encode(errors="surrogateescape"))
    assert name({}, (path,)) == "mine"


@pytest.mark.parametrize(
    "text",
    [
        'nodes = \nname = "mine"',
        '[cluster]\nnodes = \nname = "mine"',
        '[cluster]\nnmae = "mine"',
        '[cluster]\nname = "No Name"',
        '[clutser]\nname = "mine"',
        'name = "mine"',
        '[job]\nname = "mine"',
        '[cluster]\nNAME = "mine"',
        '[cluster.main]\nname = "mine"',
        '[tool.cloudddp.cluster]\nname = "mine"',
    ],
)
def test_name_is_not_guessed_from_a_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cloudddp.toml"
    path.write_text(text)
    with pytest.raises(UsageError):
        name({}, (path,))


def test_name_is_not_guessed_from_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        name({}, (tmp_path / "missing.toml",))


@pytest.mark.parametrize("variable", ["CLOUDDDP_CLUSTR", "CLOUDDDP_NAME"])
def test_name_is_not_guessed_from_a_variable(variable: str) -> None:
    with pytest.raises(UsageError):
        name({variable: "mine"}, NO_FILE)


@pytest.mark.parametrize(("variable", "value"), [("CLOUDDDP_NODES", "many"), ("CLOUDDDP_MAX_HUORS", "2")])
def test_broken_variable_that_cannot_name_the_cluster_is_ignored(variable: str, value: str) -> None:
    assert name({variable: value}, NO_FILE) == "default"

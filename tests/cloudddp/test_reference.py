"""The pages that are made from the code are as the code makes them, and every command explains itself."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cloudddp import settings, spec
from cloudddp.cli import main, reference

ROOT = Path(__file__).parents[2]


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, f"{path} {name}")


EVERY = dict(commands(main, "cloudddp"))


@pytest.mark.parametrize("page", sorted(reference.PAGES))
def test_a_generated_page_is_not_stale(page: str) -> None:
    path = ROOT / page
    assert path.exists(), "write it with: python -m cloudddp.cli.reference"
    assert path.read_text() == reference.PAGES[page](), "renew it with: python -m cloudddp.cli.reference"


@pytest.mark.parametrize("path", EVERY)
def test_every_command_has_help_and_is_in_the_manual(path: str) -> None:
    assert EVERY[path].help
    titles = [line.lstrip("#").strip() for line in (ROOT / "docs" / "commands.md").read_text().splitlines()]
    assert path in titles


@pytest.mark.parametrize("path", EVERY)
def test_every_option_has_help(path: str) -> None:
    options = [option for option in EVERY[path].params if isinstance(option, click.Option)]
    assert [option.name for option in options if not option.help and not option.hidden] == []


def test_the_written_configuration_is_valid_and_sets_nothing_but_the_name(tmp_path: Path) -> None:
    path = tmp_path / "cloudddp.toml"
    path.write_text(reference.example_toml("demo"))
    assert settings.read_toml(path).values == {
        "cluster": {"name": "demo"},
        "job": {},
        "sync": {},
        "setup": {},
    }
    assert settings.resolve([settings.read_toml(path)]).cluster.name == "demo"


def test_the_defaults_that_it_shows_are_the_defaults_once_uncommented(tmp_path: Path) -> None:
    lines = []
    for line in reference.example_toml("default").splitlines():
        key, is_setting, _ = line.removeprefix("# ").partition(" = ")
        known = is_setting and any(key in spec.fields(section) for section in spec.SECTIONS)
        lines.append(line.removeprefix("# ") if known else line)
    text = "\n".join(lines)
    defaults = {section: reference.defaults(section) for section in spec.SECTIONS}
    shown = {section: set(table) for section, table in tomllib.loads(text).items()}
    assert shown == {name: {k for k, v in table.items() if v is not None} for name, table in defaults.items()}
    path = tmp_path / "cloudddp.toml"
    path.write_text(text)
    assert settings.resolve([settings.read_toml(path)]) == spec.Config()


def test_every_setting_is_in_the_written_configuration_and_in_the_manual() -> None:
    example = reference.example_toml("demo")
    page = (ROOT / "docs" / "configuration.md").read_text()
    for section in spec.SECTIONS:
        for key in spec.fields(section):
            assert f"\n# {key} =" in example or f"\n{key} =" in example, key
            assert f"| `{key}` |" in page, key


@pytest.mark.parametrize(
    "folder", ["My Project", "UPPER", "a" * 60, "...", "\u65e5\u672c", "a_b.c", "-x-", "a" * 39 + "-b"]
)
def test_the_name_made_from_a_folder_is_always_a_legal_one(tmp_path: Path, folder: str) -> None:
    name = reference.name_for(tmp_path / folder)
    assert settings.resolve([settings.Layer("here", {"cluster": {"name": name}})]).cluster.name == name

"""Generated pages are up to date, every command has help, and nothing is described twice without a check."""

from __future__ import annotations

import inspect
from pathlib import Path

import click
import pytest
from support.commands import commands, context_of

from cloudddp.cli.lazy_commands import LazyGroup, SettingOption, Verb, load
from cloudddp.config import schema, settings
from cloudddp.config.descriptions import DESCRIPTIONS
from docs import reference

ROOT = Path(__file__).parents[2]
EVERY = dict(commands())
VERBS = [command for command in EVERY.values() if isinstance(command, Verb)]
GROUPS = [command for command in EVERY.values() if isinstance(command, LazyGroup)]
SHORT = 12  # characters of a default that is shown in an option's help


@pytest.mark.parametrize("page", sorted(reference.PAGES))
def test_generated_page_is_up_to_date(page: str) -> None:
    path = ROOT / page
    assert path.exists(), "write it with: python -m docs.reference"
    assert path.read_text() == reference.PAGES[page](), "update it with: python -m docs.reference"


def test_commands_and_options_have_help_and_are_in_the_manual() -> None:
    titles = [line.lstrip("#").strip() for line in (ROOT / "docs" / "commands.md").read_text().splitlines()]
    for path, command in EVERY.items():
        assert command.help, path
        assert path in titles
        options = [option for option in command.params if isinstance(option, click.Option)]
        assert [option.name for option in options if not option.help and not option.hidden] == [], path


def listed(group: LazyGroup) -> dict[str, str]:
    """Return the short helps of a group's commands, as `--help` lists them."""
    return {name: short for name, (_, short) in group.table.items()}


@pytest.mark.parametrize("group", GROUPS, ids=[str(group.name) for group in GROUPS])
def test_table_of_a_group_matches_its_commands(group: LazyGroup) -> None:
    context = context_of(group)
    found = {name: group.get_command(context, name) for name in group.table}
    assert {name: command.name for name, command in found.items() if command} == {n: n for n in group.table}
    own = {name: command.get_short_help_str(limit=1000) for name, command in found.items() if command}
    assert listed(group) == own


@pytest.mark.parametrize("group", GROUPS, ids=[str(group.name) for group in GROUPS])
def test_help_of_a_group_has_every_command_under_a_heading(group: LazyGroup) -> None:
    text = group.get_help(context_of(group))
    lines = [line for line in text.splitlines() if line.startswith("  ") and line.split()[0] in group.table]
    assert sorted(line.split()[0] for line in lines) == sorted(listed(group))  # one line for each
    assert max(map(len, text.splitlines())) <= reference.WIDTH


@pytest.mark.parametrize("verb", VERBS, ids=[str(verb.name) for verb in VERBS])
def test_help_of_a_verb_is_a_screen_with_an_example(verb: Verb) -> None:
    context = context_of(verb)
    lines = verb.get_help(context).splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= reference.WIDTH
    assert "Example" in "".join(lines)
    named = [
        option.opts[-1] for option in verb.params if isinstance(option, click.Option) and not option.hidden
    ]
    text = "\n".join(lines)
    assert [name for name in named if name not in text] == []  # a rare one by its name


def test_parameters_of_a_verb_match_its_function() -> None:
    for verb in VERBS:
        values = {str(parameter.name): None for parameter in verb.params if parameter.expose_value}
        signature = inspect.signature(load(verb.action))
        signature.bind(None, **verb.arguments(values))  # raises TypeError


def test_options_that_are_settings_show_the_default_of_the_setting() -> None:
    options = [one for verb in VERBS for one in verb.params if isinstance(one, SettingOption)]
    assert options
    for option in options:
        if option.opts == ["--gpu"]:  # the default is a type
            continue
        default = reference.defaults(option.section)[option.key]
        shown = (
            ""
            if default is None or isinstance(default, (bool, tuple, dict))
            else f"{default:g}"
            if isinstance(default, float)
            else str(default)
        )
        assert option.standard == (shown if len(shown) <= SHORT else ""), option.opts
        assert option.standard in str(option.help)


def test_every_setting_has_one_description() -> None:
    described = {section: set(table) for section, table in DESCRIPTIONS.items()}
    assert described == {section: set(schema.fields(section)) for section in schema.SECTIONS}


@pytest.mark.parametrize(
    "folder", ["My Project", "UPPER", "a" * 60, "...", "\u65e5\u672c", "a_b.c", "-x-", "a" * 39 + "-b"]
)
def test_name_made_from_a_folder_is_valid(tmp_path: Path, folder: str) -> None:
    name = schema.example_name(tmp_path / folder)
    assert settings.resolve([settings.Layer("here", {"cluster": {"name": name}})]).cluster.name == name

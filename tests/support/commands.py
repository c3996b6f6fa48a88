"""The commands of the command line, each loaded from its group's table."""

from __future__ import annotations

from collections.abc import Iterator

import click

from cloudddp.cli.main import main
from docs import reference


def context_of(command: click.Command) -> click.Context:
    """Return a context with the options of `--help` that users have; click keeps them from the first look at
    a command."""
    root = click.Context(main, info_name="cloudddp", terminal_width=reference.WIDTH, **main.context_settings)
    return root if command is main else click.Context(command, info_name=command.name, parent=root)


def commands(group: click.Group = main, path: str = "cloudddp") -> Iterator[tuple[str, click.Command]]:
    """Yield (path, command) of a group and of every command in it: ("cloudddp sim start", ...)."""
    yield path, group
    context = context_of(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, f"{path} {name} is in the table but does not exist"
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def verb(name: str) -> click.Command:
    command = main.get_command(context_of(main), name)
    assert command is not None
    return command

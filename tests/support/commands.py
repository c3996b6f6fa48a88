"""The commands of the command line, each loaded from its group's table."""

from __future__ import annotations

from collections.abc import Iterator

import click

from cloudddp.cli.main import main


def commands(group: click.Group = main, path: str = "cloudddp") -> Iterator[tuple[str, click.Command]]:
    """Yield (path, command) of a group and of every command in it: ("cloudddp sim start", ...)."""
    yield path, group
    context = click.Context(group, info_name=path)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, f"{path} {name} is in the table but does not exist"
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def verb(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command

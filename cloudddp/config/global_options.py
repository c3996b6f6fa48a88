"""What was given on the command line, as plain data. Standard library only: `--help` imports it.

`GlobalOptions` are the options of every command; a `Flag` is an option that stands for a setting.
"""

from __future__ import annotations

import shlex
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from cloudddp.errors import Command, ToolCommand

# They need no cluster, so the options that choose one would only make a suggested command longer.
WITHOUT_OPTIONS = ("init", "sim")


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """The global options as given, before the verb or after it; None and False: not given."""

    cluster: str | None = None
    config: str | None = None
    region: str | None = None
    profile: str | None = None
    sim: bool = False
    verbose: bool = False
    timings: bool = False

    def command_line(self, command: Command) -> str:
        """Return a command as this user has to type it: with the options that choose the cluster.

        An option that the command itself names is not repeated. A command of another program gets the
        profile, or with --sim the simulator's environment; its region, if it needs one, is in the command.
        """
        if isinstance(command, ToolCommand):
            return self._of_tool(command)
        chosen = {
            "-c": self.cluster,
            "--config": self.config,
            "--region": self.region,
            "--profile": self.profile,
        }
        named = self._named(command, chosen)
        words = ["--sim"] if self.sim else []
        for option, value in chosen.items():
            words += [option, value] if value and option not in named else []
        if command.words[0] in WITHOUT_OPTIONS or command.words[0].startswith("-"):
            words = []
        return shlex.join(["cloudddp", *words, *command.words])

    @staticmethod
    def _named(command: Command, options: Container[str]) -> list[str]:
        """Return those of the options that the command itself names, right after the verb: not those of a
        script."""
        at = 1
        while at < len(command.words) and command.words[at] in options:
            at += 2
        return list(command.words[1:at:2])

    def _of_tool(self, command: ToolCommand) -> str:
        if self.sim:
            return shlex.join(["cloudddp", "sim", "exec", "--", *command.words])
        is_aws = command.words[0] == "aws" and "--profile" not in command.words
        return shlex.join([*command.words, *(["--profile", self.profile] if is_aws and self.profile else [])])


@dataclass(frozen=True, slots=True)
class Flag:
    """A setting given as an option: `Flag("--nodes", "cluster", "nodes", "4")`. The value is not validated
    yet."""

    option: str
    section: str
    key: str
    value: Any

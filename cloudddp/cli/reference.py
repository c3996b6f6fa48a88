"""Texts made from the settings' own table: the cloudddp.toml that `init` writes, and the reference in docs/.

One source, so that neither can rot; a test compares the pages in docs/ with what comes out here.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from cloudddp import settings, spec

INTRODUCTION = {
    "cluster": "The machines, where they are, and when they end.",
    "job": "How ranks are started.",
    "sync": "Which files go to the nodes.",
    "setup": "Commands run on every node in the project's folder, once per content, after the sync.",
}


def name_for(folder: Path) -> str:
    """Return a cluster name made from a project folder's name."""
    word = re.sub(r"[^a-z0-9-]+", "-", Path(os.path.normpath(folder.absolute())).name.lower()).strip("-")[:40]
    return word or "default"


def toml_value(value: Any) -> str:
    """Return a default as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{}"
    return json.dumps(value)


def defaults(section: str) -> dict[str, Any]:
    """Return {key: default} of a section."""
    empty = spec.SECTIONS[section]()
    return {key: getattr(empty, key) for key in spec.fields(section)}


def example_toml(name: str) -> str:
    """Return a cloudddp.toml in which every setting is explained and, but for the name, left at its default."""
    lines = ["# Settings of cloudddp. What is commented out shows the default."]
    for section, values in ((section, defaults(section)) for section in spec.SECTIONS):
        lines += ["", f"# {INTRODUCTION[section]}", f"[{section}]"]
        for key, default in values.items():
            lines.append(f"# {spec.help_of(section, key)}")
            if (section, key) == ("cluster", "name"):
                lines.append(f"name = {toml_value(name)}")
            elif default is None:
                lines.append(f"# {key} =")
            else:
                lines.append(f"# {key} = {toml_value(default)}")
    return "\n".join(lines) + "\n"


def configuration_page() -> str:
    """Return docs/configuration.md."""
    out = [
        "# Configuration",
        "",
        "Generated from `cloudddp/spec.py` by `python -m cloudddp.cli.reference`; do not edit.",
        "",
        "`cloudddp init` writes a commented `cloudddp.toml`. The strongest source wins: flag, environment variable,",
        "`cloudddp.toml` (or `--config FILE`), `config.toml` in the user's configuration folder, default. `cloudddp.toml` is",
        "looked for in the current folder, then above it within the repository or below the user's home; its folder is the",
        "project. An unknown key, section or `CLOUDDDP_*` variable is an error that names the nearest known one, and every",
        "value is checked before anything is called.",
    ]
    for section in spec.SECTIONS:
        out += ["", f"## [{section}]", "", INTRODUCTION[section], ""]
        out += ["| key | default | allowed | environment | meaning |", "|---|---|---|---|---|"]
        for key, default in defaults(section).items():
            shown = "" if default is None else f"`{toml_value(default)}`"
            variable = settings.variable_of(section, key)
            out.append(
                f"| `{key}` | {shown} | {spec.allowed(spec.fields(section)[key])} "
                f"| {f'`{variable}`' if variable else ''} | {spec.help_of(section, key)} |"
            )
    return "\n".join(out) + "\n"


def commands_page() -> str:
    """Return docs/commands.md: every verb's own help, as click prints it."""
    import click

    from cloudddp.cli import main
    from cloudddp.cli.common import CONTEXT

    out = [
        "# Commands",
        "",
        "Generated from the commands' own help by `python -m cloudddp.cli.reference`; do not edit.",
        "",
        "Exit codes: 0 done; 1 failed; 2 bad usage or configuration (nothing was made or changed); 3 something is left",
        "running or billing; 130 interrupted; `launch`, `run` and `logs -f`: the job's own code. Data goes to stdout, progress",
        "to stderr. The global options may stand before the verb or after it.",
    ]

    def add(command: click.Command, path: str, level: int) -> None:
        context = click.Context(command, info_name=path, **CONTEXT)
        context.terminal_width = 100
        out.extend(["", f"{'#' * level} {path}", "", "```text", command.get_help(context), "```"])
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                add(command.commands[name], f"{path} {name}", 2 if level == 1 else 3)

    add(main, "cloudddp", 1)
    return (
        "\n".join(line.rstrip() for line in "\n".join(out).split("\n")).replace(
            "# cloudddp\n", "## cloudddp\n", 1
        )
        + "\n"
    )


PAGES = {"docs/configuration.md": configuration_page, "docs/commands.md": commands_page}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (Path(__file__).parent.parent.parent / page).write_text(make())

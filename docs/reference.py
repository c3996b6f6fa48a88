"""The generated files of the repository: docs/configuration.md from config/spec.py, docs/commands.md from the
commands' own help, and the sbatch script of the example, as `cloudddp export slurm train.py` prints it.

`python -m docs.reference` writes them; a test compares them with what is generated.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from cloudddp.cli.lazy_commands import EVERY_OPTION
from cloudddp.cli.main import main
from cloudddp.config import schema, settings
from cloudddp.config.descriptions import DESCRIPTIONS
from cloudddp.job import slurm
from cloudddp.job.job_request import Script

ROOT = Path(__file__).parents[1]
WIDTH = 78  # what click uses on a terminal of 80 columns
GENERATED = "by `python -m docs.reference`; do not edit."


def configuration_page() -> str:
    """Return docs/configuration.md."""
    out = [
        "# Configuration",
        "",
        f"Generated from `cloudddp/config/spec.py` {GENERATED}",
        "",
        "`cloudddp init` writes a commented `cloudddp.toml`. A setting is taken from the first of these "
        "sources that has it:",
        "flag, environment variable, `cloudddp.toml` (or `--config FILE`), `config.toml` in the user's "
        "configuration folder,",
        "default. `cloudddp.toml` is searched for in the current folder, then in the folders above it "
        "within the repository or",
        "below the user's home; its folder is the project. An unknown key, section or `CLOUDDDP_*` variable "
        "is an error that",
        "names the most similar known one, and every value is validated before anything is called.",
    ]
    for section in schema.SECTIONS:
        text = " ".join(str(schema.SECTIONS[section].__doc__).split()).partition(": ")[2]
        out += ["", f"## [{section}]", "", text[0].upper() + text[1:], ""]
        out += ["| key | default | allowed | environment | meaning |", "|---|---|---|---|---|"]
        for key, default in defaults(section).items():
            shown = "" if default is None else f"`{schema.toml_value(default)}`"
            variable = settings.variable_of(section, key)
            allowed = schema.allowed(schema.fields(section)[key])
            if section == "cluster":  # see settings._listed
                allowed = allowed.replace("a list in brackets, each", "a list in brackets, or one text; each")
            out.append(
                f"| `{key}` | {shown} | {allowed} | {f'`{variable}`' if variable else ''} | "
                f"{DESCRIPTIONS[section][key]} |"
            )
    return "\n".join(out) + "\n"


def defaults(section: str) -> dict[str, Any]:
    """Return {key: default} of a section."""
    kind = schema.SECTIONS[section]
    required = [one.name for one in dataclasses.fields(kind) if one.default is one.default_factory]
    empty = kind(**dict.fromkeys(required))
    found = {key: getattr(empty, key) for key in schema.fields(section)}
    return {**found, "name": None} if section == "cluster" else found  # the name is that of the folder


def commands_page() -> str:
    """Return docs/commands.md: the help of every verb, as on a terminal of 80 columns."""
    out = [
        "# Commands",
        "",
        f"Generated from the commands' own help {GENERATED}",
        "",
        "Exit codes: 0 done; 1 failed; 2 bad usage or configuration (nothing was created or changed); 3 "
        "something is left",
        "running or billing; 130 interrupted; `launch`, `run` and `logs -f`: the job's own code. Data goes "
        "to stdout, progress",
        "to stderr. The global options may come before the verb or after it.",
    ]
    root = click.Context(main, info_name="cloudddp", terminal_width=WIDTH, **main.context_settings)
    root.meta[EVERY_OPTION] = True
    out += _section(main, root, 2)
    return "\n".join(line.rstrip() for line in "\n".join(out).split("\n")) + "\n"


def _section(command: click.Command, context: click.Context, level: int) -> list[str]:
    """Return the help of a command, and of those in it if it is a group."""
    out = ["", f"{'#' * level} {context.command_path}", "", "```text", command.get_help(context), "```"]
    if isinstance(command, click.Group):
        deeper = level if context.parent is None else level + 1
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                inside = click.Context(inner, info_name=name, parent=context, **inner.context_settings)
                out += _section(inner, inside, deeper)
    return out


def example_sbatch_script() -> str:
    """Return examples/ddp/sbatch.sh: the script of a job with the default settings."""
    return slurm.render(settings.resolve([]), Script("train.py"), slurm.SlurmOptions())


PAGES = {
    "docs/configuration.md": configuration_page,
    "docs/commands.md": commands_page,
    "examples/ddp/sbatch.sh": example_sbatch_script,
}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (ROOT / page).write_text(make())

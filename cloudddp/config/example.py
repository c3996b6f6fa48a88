"""The cloudddp.toml that `init` writes, made from the fields of spec/."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudddp.config import schema

INTRODUCTION = {
    "cluster": "The nodes, where they run, and when they terminate.",
    "job": "How ranks are started.",
    "sync": "Which files are sent to the nodes.",
    "setup": "Commands run on every node in the project's folder, once per content, after the sync.",
}


def name_for(folder: Path) -> str:
    """Return a cluster name made from a project folder's name."""
    word = re.sub(r"[^a-z0-9-]+", "-", Path(os.path.normpath(folder.absolute())).name.lower()).strip("-")[:40]
    return word or "default"


def toml_value(value: Any) -> str:
    """Return a default in TOML syntax."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{}"
    return json.dumps(value)


def defaults(section: str) -> dict[str, Any]:
    """Return {key: default} of a section."""
    empty = schema.SECTIONS[section]()
    found = {key: getattr(empty, key) for key in schema.fields(section)}
    return {**found, "name": None} if section == "cluster" else found  # the name is that of the folder


def toml(name: str, given: Mapping[tuple[str, str], Any] | None = None) -> str:
    """Return a cloudddp.toml that explains every setting. The name and the values `given` by (section, key)
    are set; the others are left at their defaults."""
    values_set = {("cluster", "name"): name, **(given or {})}
    lines = ["# Settings of cloudddp. Lines that are commented out show the defaults."]
    for section, values in ((section, defaults(section)) for section in schema.SECTIONS):
        lines += ["", f"# {INTRODUCTION[section]}", f"[{section}]"]
        for key, default in values.items():
            lines.append(f"# {schema.help_of(section, key)}")
            if (section, key) in values_set:
                lines.append(f"{key} = {toml_value(values_set[section, key])}")
            elif default is None:
                lines.append(f"# {key} =")
            else:
                lines.append(f"# {key} = {toml_value(default)}")
    return "\n".join(lines) + "\n"

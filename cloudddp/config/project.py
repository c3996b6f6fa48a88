"""Where the project and its configuration files are. Reads no file's content."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cloudddp import local_state
from cloudddp.errors import UsageError
from cloudddp.safe_files import resolved

CONFIG_NAME = "cloudddp.toml"


@dataclass(frozen=True, slots=True)
class Project:
    """The folder whose files the nodes get, and the existing configuration files, by precedence."""

    root: Path
    files: tuple[Path, ...]
    from_parent: Path | None = None  # the configuration file, where a folder above the current one holds it


def find(config: str | None) -> Project:
    """Return the project of the current folder, or that of a configuration file (`--config`).

    Raises UsageError where the folder cannot be read.
    """
    if config:
        return Project(resolved(config).parent, (Path(config),))
    try:
        here = Path.cwd()
        found = nearest_config(here)
    except PermissionError as error:  # after `su`, for example
        raise UsageError(
            f"{error.filename or 'the current folder'} cannot be read: {error.strerror}",
            hint="cd to your project",
        ) from None
    root = found.parent if found else here
    own = root / CONFIG_NAME  # also if it is not a regular file: reading it reports that
    files = [path for path in (own, local_state.user_config()) if path is not None and path.exists()]
    return Project(root, tuple(files), own if own in files and root != here else None)


def nearest_config(folder: Path) -> Path | None:
    """Return the cloudddp.toml of a folder, or of one above it inside the repository or, outside one, below the home.

    Never further: a file in a folder that several users share would decide what is sent to the nodes and run there.
    """
    here, home = resolved(folder), resolved(os.path.expanduser("~"))  # noqa: PTH111  Path's raises without a home
    repository = next((path for path in (here, *here.parents) if (path / ".git").exists()), None)
    for path in (here, *here.parents):
        allowed = path == here or repository is not None or (path != home and path.is_relative_to(home))
        if not allowed:
            return None
        if (path / CONFIG_NAME).is_file():
            return path / CONFIG_NAME
        if path == repository:
            return None
    return None

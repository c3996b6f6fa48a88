"""Where the project and its configuration files are. Reads no file's content."""

from __future__ import annotations

import os
import pwd
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cloudddp.errors import UsageError
from cloudddp.files import resolved, user_config

CONFIG_NAME = "cloudddp.toml"

# Folders of the operating system, directly below /. Others there, such as /workspace in a container, may be
# projects.
_SYSTEM = re.compile(
    r"bin|boot|dev|etc|home|lib\w*|lost\+found|media|mnt|opt|proc|root|run|sbin|srv|sys|tmp|usr|var|"
    r"Applications|Library|System|Users|Volumes|private"
)


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
    files = [path for path in (own, user_config()) if path is not None and path.exists()]
    return Project(root, tuple(files), own if own in files and root != here else None)


def require(root: Path) -> None:
    """Raise UsageError for a folder that holds more than a project, since all of its files would be sent: a
    home folder, `/`, what is above a home, and folders of the operating system."""
    folder = resolved(root)
    if kind := holds_more(folder):
        raise UsageError(
            f"{folder} is {kind}, so it is not a project: all of its files would be sent to the nodes",
            hint="make one: `mkdir my-project`, move the script and its files there, `cd my-project`",
        )


def holds_more(folder: Path) -> str:
    """Return what a folder, without links in its path, is that holds more than a project; '' for none of
    these."""
    homes = [resolved(home) for home in (os.path.expanduser("~"), _home_of(os.getuid())) if home]  # noqa: PTH111
    if folder in homes:
        return "your home folder"
    if any(home.is_relative_to(folder) for home in homes):
        return "above your home folder"
    if folder == folder.parent:
        return "the root of the file system"
    # Under sudo, for example.
    if folder.exists() and folder == resolved(_home_of(folder.stat().st_uid) or os.devnull):
        return "the home folder of its owner"
    temporary = (tempfile.gettempdir(), "/var/tmp")  # noqa: S108  they are refused
    if folder in map(resolved, temporary):
        return "a folder for temporary files of all programs"
    if folder.parent == Path("/") and _SYSTEM.fullmatch(folder.name):
        return "a folder of the operating system"
    return ""


def _home_of(uid: int) -> str:
    """Return the home folder of an account, also where HOME names another one; '' for none."""
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        return ""


def repository_of(folder: Path) -> Path | None:
    """Return the nearest folder, this one or one above, that has a `.git`, whether or not git can read it."""
    return next((path for path in (folder, *folder.parents) if os.path.lexists(path / ".git")), None)


def nearest_config(folder: Path) -> Path | None:
    """Return the cloudddp.toml of a folder, or of one above it inside the repository or, outside one, below
    the home.

    Never further: a file in a folder that several users share would decide what is sent to the nodes and run
    there.
    """
    here, home = resolved(folder), resolved(os.path.expanduser("~"))  # noqa: PTH111  Path's raises without a home
    repository = repository_of(here)
    for path in (here, *here.parents):
        allowed = path == here or repository is not None or (path != home and path.is_relative_to(home))
        if not allowed:
            return None
        if (path / CONFIG_NAME).is_file():
            return path / CONFIG_NAME
        if path == repository:
            return None
    return None

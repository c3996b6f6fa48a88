"""The folder with cloudddp's state on this computer: where it is, and how its files are replaced."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from pathlib import Path

import platformdirs

from cloudddp import safe_files
from cloudddp.errors import UsageError
from cloudddp.safe_files import Folder


def home() -> Path:
    """Return the state folder: CLOUDDDP_HOME if set, else the platform's state folder of the user."""
    if chosen := os.environ.get("CLOUDDDP_HOME"):
        return Path(chosen).absolute()
    # Without a home folder (no HOME, no account with that uid) platformdirs raises, or returns a relative
    # path.
    with contextlib.suppress(RuntimeError):
        if (found := Path(platformdirs.user_state_dir("cloudddp"))).is_absolute():
            return found
    raise UsageError("there is no home folder for cloudddp's state", hint="set HOME, or CLOUDDDP_HOME")


def user_config() -> Path | None:
    """Return the path of the user's configuration file, which may not exist; None without a home folder."""
    with contextlib.suppress(RuntimeError):
        if (found := Path(platformdirs.user_config_dir("cloudddp"))).is_absolute():
            return found / "config.toml"
    return None


def check_home() -> None:
    """Raise UsageError if the state folder exists and other users can write to it. Changes nothing."""
    safe_files.check(home())


def write_atomic(path: Path, data: bytes | str, mode: int = 0o600) -> None:
    """Replace `path` so that a reader, or a crash, sees the old file or the new one, never a part.

    Its folder becomes private, and no symbolic link inside the state folder is followed. Raises UsageError,
    OSError.
    """
    content = data.encode() if isinstance(data, str) else data
    with _private(path.parent) as folder:
        folder.replace(path.name, content, mode)


def _private(path: Path) -> Folder:
    root = home() if path.is_relative_to(home()) else path
    return safe_files.private(root, *path.relative_to(root).parts)


def project_id(root: Path) -> str:
    """Return the random id of a project folder on this computer; nodes remember whose files they have."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:32]
    path = home() / "projects" / name
    with contextlib.suppress(OSError, ValueError):
        if re.fullmatch("[0-9a-f]{32}", found := path.read_text("ascii")):
            return found
    write_atomic(path, new := secrets.token_hex(16))
    return new

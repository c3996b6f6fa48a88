"""Errors of the local file system while results are written, for a user."""

from __future__ import annotations

import errno
from pathlib import Path

from cloudddp.errors import CloudDDPError, Command, Text

FREE_SPACE_HINT: Text = (
    "free some, pull less (",
    Command("pull", "PATH"),
    "), or choose another folder with --to",
)
OTHER_FOLDER_HINT = "choose another folder with --to"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def cannot_write(to: Path, error: OSError) -> CloudDDPError:
    """Return the error for results that could not be written to the folder `to`."""
    if error.errno in _FULL:
        return CloudDDPError(
            f"{to}: no space left on this computer's disk for the results; nothing was kept",
            hint=FREE_SPACE_HINT,
        )
    where = f" ({error.filename})" if error.filename and str(to) != str(error.filename) else ""
    return CloudDDPError(f"cannot write results to {to}{where}: {error.strerror}", hint=OTHER_FOLDER_HINT)

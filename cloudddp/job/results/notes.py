"""What a pull has not copied, and why, for the user and the node; and the errors of this computer's disk."""

from __future__ import annotations

import errno
from pathlib import Path

from cloudddp.agent.protocol.codec import MAX_REASON
from cloudddp.agent.protocol.results import MAX_LEFT, SkippedFile
from cloudddp.errors import CloudDDPError, Message
from cloudddp.formats import plural
from cloudddp.text import one_line

MAX_NOTES = 50  # that are shown; the others are counted
LONGEST_NOTE = 500  # characters of a note
FREE_SPACE_HINT: str = Message(
    "free some, pull less (`cloudddp pull PATH`), or choose another folder with --to"
)
OTHER_FOLDER_HINT = "choose another folder with --to"


class Notes:
    """`left` are results that were not copied; None where there are more than a node remembers. `missing`: do
    not exist. `of_logs`: that one does not exist or was changing is no note."""

    def __init__(self, *, of_logs: bool = False) -> None:
        self._of_logs = of_logs
        self.missing: set[str] = set()
        self._lines: dict[str, None] = {}
        self._more = self._deleted = 0
        self._left: dict[str, str] = {}
        self._has_more_left = False

    def left_out(self, name: str, why: str, *, counts: bool = True) -> None:
        """Note that a file was not copied. `counts`: a result may be missing because of it. No name: nor were
        more files. No reason: it does not exist."""
        if why:
            self.add(f"left out {name}: {why}" if name else f"left out {why}")
        elif not self._of_logs:
            self.add(f"missing {name}")
            self.missing.add(name)
        if counts and name and len(self._left) < MAX_LEFT:
            self._left.setdefault(name, one_line(why, MAX_REASON))
        elif counts and name not in self._left:
            self._has_more_left = True

    def changed(self, name: str) -> None:
        """Note that a file may be a mix of two versions."""
        if not self._of_logs:
            self.add(f"changed while it was copied: {name}; pull it again when nothing writes to it")

    def deleted(self, name: str) -> None:
        """Count a file that the node no longer has, unless it has said why."""
        self._deleted += not (self._of_logs or self._has_more_left or name in self._left)

    def add(self, note: str) -> None:
        line = one_line(note, LONGEST_NOTE)
        if line not in self._lines and len(self._lines) == MAX_NOTES:
            self._more += 1
        else:
            self._lines[line] = None

    @property
    def left(self) -> tuple[SkippedFile, ...] | None:
        return None if self._has_more_left else tuple(SkippedFile(*item) for item in self._left.items())

    @property
    def lines(self) -> tuple[str, ...]:
        """The notes, a line that counts those not shown, and one that counts files that were deleted."""
        more = [f"and {self._more} more"] if self._more else []
        count = plural(self._deleted, "file")
        gone = [f"deleted on the node before they were copied: {count}"] if self._deleted else []
        return (*self._lines, *more, *gone)


def cannot_write(to: Path, error: OSError) -> CloudDDPError:
    """Return the error for results that could not be written to the folder `to`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CloudDDPError(
            f"{to}: no space left on this computer's disk for the results; nothing was kept",
            hint=FREE_SPACE_HINT,
        )
    where = f" ({error.filename})" if error.filename and str(to) != str(error.filename) else ""
    return CloudDDPError(f"cannot write results to {to}{where}: {error.strerror}", hint=OTHER_FOLDER_HINT)

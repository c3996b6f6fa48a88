"""Notes on files that a pull did not transfer: the first ones, and how many more there are."""

from __future__ import annotations

from cloudddp.agent.protocol.codec import MAX_REASON
from cloudddp.agent.protocol.results import MAX_LEFT, LeftFile
from cloudddp.text import one_line

MAX_NOTES = 50  # that are shown; the others are counted
LONGEST = 500  # characters of a note
_STDERR = 1 << 16  # bytes of the agent's notes that are kept
MISSING = "missing "
CHANGED = "changed while it was copied: "


class Notes:
    """Collects our own notes and the agent's, which are lines on stderr."""

    def __init__(self) -> None:
        self._ours: list[str] = []
        self._more = 0
        self._stderr = bytearray()
        self._cut = False
        self._left: dict[str, str] = {}
        self._left_more = False

    def left_out(self, name: str, why: str, *, counts: bool = True) -> None:
        """Note that a file was not copied. `counts`: a result may be missing because of it. No name: nor were
        more files."""
        self._add(f"left out {name or why}" + (f": {why}" if name else ""))
        if counts and name and len(self._left) < MAX_LEFT:
            self._left.setdefault(name, one_line(why, MAX_REASON))
        elif counts and name not in self._left:
            self._left_more = True

    @property
    def left(self) -> tuple[LeftFile, ...] | None:
        """Results that were not copied; None where there are more than a node remembers."""
        return None if self._left_more else tuple(LeftFile(*one) for one in self._left.items())

    def changed(self, name: str) -> None:
        """Note that a file may be a mix of two versions."""
        self._add(f"{CHANGED}{name}; pull it again when nothing writes to it")

    def _add(self, note: str) -> None:
        if len(self._ours) < MAX_NOTES:
            self._ours.append(one_line(note, LONGEST))
        else:
            self._more += 1

    def feed(self, data: bytes) -> None:
        """Take a piece of the agent's stderr."""
        free = _STDERR - len(self._stderr)
        self._stderr += data[:free]
        self._cut = self._cut or len(data) > free

    def last(self) -> str:
        """Return the last line of the agent's stderr, such as an error message."""
        lines = self._stderr_lines()
        return one_line(lines[-1], LONGEST) if lines else ""

    def lines(self) -> tuple[str, ...]:
        """Return the notes, and a line that counts those not shown."""
        agents = [one_line(line, LONGEST) for line in self._stderr_lines() if line.startswith(MISSING)]
        more = self._more + max(len(agents) - MAX_NOTES, 0)
        if self._cut:
            rest = [f"and more than {more} more" if more else "and more, which are not shown"]
        else:
            rest = [f"and {more} more"] if more else []
        return (*agents[:MAX_NOTES], *self._ours, *rest)

    def _stderr_lines(self) -> list[str]:
        return [line for line in self._stderr.decode(errors="replace").split("\n") if line.strip()]

"""Separates the output of a command from that of its login shell.

sshd runs a command in the user's login shell, which reads start files first (`~/.bashrc`, `~/.ssh/rc`). What
they print would be read as the beginning of the output. So the shell prints a random marker on both streams
before the command, and everything before it is skipped.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable

from cloudddp.errors import Message, NodeError, q
from cloudddp.text import one_line

MAX_NOISE = 16 << 20  # bytes that start files may write to each stream
_TAIL = 2000  # bytes of them that are kept

first_lines: dict[str, str] = {}  # node -> the first line that its start files wrote to stdout


class Marker:
    """The markers of one command. The shell gets each in two parts: with `set -x` it prints the text of its
    commands."""

    def __init__(self, *, at_exit: bool = False, has_input: bool = True) -> None:
        """`at_exit`: print another marker, with the exit code, when the command has ended, although a process
        that it left in the background may hold its streams open. `has_input`: the command gets the channel's
        input, whose end follows."""
        self._words = [os.urandom(8).hex() for _ in range(3)]
        self.at_exit, self._has_input = at_exit, has_input

    def command(self, text: str) -> str:
        """Return what the shell has to run. The command has a line of its own: if it does not parse, the
        marker is printed before the error."""
        first, begin, end = self._words
        source = "" if self._has_input else "; exec < /dev/null"
        lines = [f"set +xv; {_print(first, begin, '')}{source}"]
        if self.at_exit:
            lines += [f"(eval {shlex.quote(text)})", f'set -- "$?"; {_print(first, end, "$1")}; exit "$1"']
        else:
            lines.append(text)
        return "\n".join(lines)

    @property
    def begin(self) -> bytes:
        return f"{self._words[0]}{self._words[1]} \n".encode()

    @property
    def end(self) -> re.Pattern[bytes]:
        return re.compile(f"{self._words[0]}{self._words[2]} ([0-9]{{1,3}})\n".encode())


def _print(first: str, second: str, word: str) -> str:
    one = f"printf '%s%s %s\\n' {first} {second} \"{word}\""
    return f"{one}; {one} >&2"


class Output:
    """One stream of a command: separates what the command itself writes."""

    def __init__(self, label: str, marker: Marker) -> None:
        self._label = label
        self._begin, self._end = marker.begin, marker.end if marker.at_exit else None
        self.skipped = bytearray()  # the end of what came before the marker
        self._size = 0  # of all of it
        self._held = b""  # may be a part of the end marker
        self.has_begun = False
        self.exit_code: int | None = None

    def feed(self, data: bytes) -> bytes:
        """Take what has arrived; return what of it the command has written. Raises NodeError if start files
        write too much."""
        if not self.has_begun:
            data = self._skip(data)
        if self._end is not None and self.exit_code is None:
            return self._until_end(self._end, data)
        if self.exit_code is not None:
            return b""  # of a process in the background
        return data

    def _skip(self, data: bytes) -> bytes:
        """Return what follows the marker."""
        before, found, after = (bytes(self.skipped) + data).partition(self._begin)
        self.has_begun = bool(found)
        self._size += len(data) - len(after)
        if self._size > MAX_NOISE:
            raise NodeError(
                f"{self._label}: its login shell writes more than {MAX_NOISE >> 20} MiB before each command",
                hint=_advice(self._label),
            )
        if not found and len(before) > _TAIL:
            before = before[: _TAIL // 2] + before[-(_TAIL // 2) :]
        self.skipped[:] = before
        return after

    def _until_end(self, end: re.Pattern[bytes], data: bytes) -> bytes:
        """Return what belongs to the command, without a part that may be the beginning of the end marker."""
        data = self._held + data
        self._held = b""
        if found := end.search(data):
            self.exit_code = int(found[1])
            return data[: found.start()]
        head = end.pattern.partition(b" ")[0] + b" "
        at = data.find(head)
        if at < 0:
            at = next(
                (len(data) - n for n in range(len(head) - 1, 0, -1) if data.endswith(head[:n])), len(data)
            )
        self._held = data[at:]
        return data[:at]

    def rest(self) -> bytes:
        """Return what was held back, at the end of the stream."""
        rest, self._held = self._held, b""
        return rest


def record(label: str, output: Output) -> None:
    """Remember what start files wrote to stdout."""
    if output.skipped and label not in first_lines:
        first_lines[label] = next(iter(_lines(output.skipped)), "blank lines")


def warning() -> str:
    """Return what a user has to know about start files, '' for nothing."""
    if not first_lines:
        return ""
    (label, line), *others = sorted(first_lines.items())
    more = f" (and {len(others)} more node{'s' * (len(others) > 1)})" if others else ""
    return (
        f"{label}{more}: ~/.bashrc or another start file of its login shell prints {line!r} before every "
        "command; cloudddp skips that"
    )


def ended_early(label: str, code: int, outputs: Iterable[Output]) -> NodeError:
    """Return the error for a shell that ended before the command."""
    written = [line for output in outputs for line in _lines(output.skipped)]
    why = f": {written[-1]}" if written else ""
    return NodeError(
        f"{label}: its login shell ended before it ran the command (exit code {code}){why}",
        hint=_advice(label),
    )


def _lines(data: bytearray) -> list[str]:
    text = bytes(data).decode(errors="replace")
    return [one_line(line.strip(), 100) for line in text.splitlines() if line.strip()]


def _advice(label: str) -> str:
    node = re.match(r"node (\d+)", label)
    return Message(
        f"correct ~/.bashrc (or ~/.ssh/rc) there: `{q('cloudddp', 'ssh', *(node.groups() if node else ()))}`"
    )

"""Text for people: what someone else wrote (a rank, a node, a tag, AWS), made safe to print, and sizes in
words. Pure.

Characters that a terminal interprets instead of printing are escaped: ESC and the other control characters,
C1 controls, bidirectional overrides, invisible characters, line separators. Everything else stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# Cc without tab and line feed, format characters that hide or reorder text, separators that some programs
# treat as a line break, lone surrogates (bytes that were not UTF-8), tag characters. The joiners U+200C and
# U+200D stay: words and emoji need them.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
_UNSAFE_OR_BREAK = re.compile(f"{_UNSAFE.pattern}|[\t\n]")
# Select Graphic Rendition with numbers: colours and weight. Every other escape sequence can move the cursor,
# change the window title, write to the clipboard or send input as if it had been typed.
_COLOUR = re.compile(r"\x1b\[([0-9;]{0,40})m")
_COLOUR_OR_UNSAFE = re.compile(f"{_COLOUR.pattern}|{_UNSAFE.pattern}")
_CONCEAL = 8  # hides the text after it
_EXTENDED = (38, 48)  # followed by 5;N or 2;R;G;B
_RESET = "\x1b[0m"


def visible(text: str) -> str:
    """Return text with everything escaped that a terminal would interpret. Tabs and line feeds stay."""
    return _UNSAFE.sub(_escaped, text)


def one_line(text: str, limit: int = 0) -> str:
    """Return text on one line, for a name, a table cell or an error reason; `limit` is the most characters to
    keep."""
    cut = text[: limit - 3] + "..." if limit and len(text) > limit else text
    return _UNSAFE_OR_BREAK.sub(_escaped, cut)


def reason_of(error: BaseException) -> str:
    """Return what an exception says, on one line: for an OSError without its number, for an empty one its
    type."""
    text = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
    return one_line(str(text), 300)


def with_colours(line: str) -> str:
    """Return a line of a rank's output for a terminal: its colours are kept, and reset at the end."""
    shown = visible_in_colour(line)
    return shown + _RESET if "\x1b" in shown else shown


def visible_in_colour(text: str) -> str:
    """Return text as `visible` does, but keep its colour sequences, except those that conceal text."""
    return _COLOUR_OR_UNSAFE.sub(lambda found: found[0] if _is_colour(found) else visible(found[0]), text)


def without_colours(line: str) -> str:
    """Return a line of a rank's output for a file or a pipe: colours are removed, as by `ls --color=auto`."""
    return visible(_COLOUR.sub(lambda found: "" if _is_colour(found) else found[0], line))


def size_of(count: int) -> str:
    """Return a number of bytes with its unit: 1 byte, 2.0 KiB, 3.4 MiB, 1.5 GiB."""
    for unit, least in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= least:
            return f"{count / least:.1f} {unit}"
    return f"{count} byte{'s' * (count != 1)}"


def columns(text: str) -> int:
    """Return how many columns of a terminal a text takes: a wide character takes two, a combining one
    none."""
    if text.isascii():
        return len(text)
    # Imported where it is needed: most text is ASCII.
    from wcwidth import wcswidth

    return max(wcswidth(text), 0) or len(text)


def some(names: Sequence[str], most: int) -> str:
    """Return the first `most` names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def node_list(nodes: Iterable[int]) -> str:
    """Return "node 1", "nodes 0, 1"."""
    ranks = sorted(nodes)
    return ("node " if len(ranks) == 1 else "nodes ") + ", ".join(map(str, ranks))


def _is_colour(found: re.Match[str]) -> bool:
    """Return whether a match is a colour sequence that does not conceal text; 8 may also be the number of a
    colour."""
    numbers = iter([] if found[1] is None else [int(part[:4] or 0) for part in found[1].split(";")])
    for number in numbers:
        if number in _EXTENDED:
            for _ in range({5: 1, 2: 3}.get(next(numbers, 0), 0)):
                next(numbers, None)
        elif number == _CONCEAL:
            return False
    return found[1] is not None


def _escaped(found: re.Match[str]) -> str:
    if "\udc80" <= found.group() <= "\udcff":  # a byte, as os.fsdecode returns it
        return f"\\x{ord(found.group()) - 0xDC00:02x}"
    return found.group().encode("unicode_escape").decode("ascii") if found.group() != "\t" else "\\t"

"""How numbers, times and lists are written in messages. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

_DAY = 86400.0  # seconds
_SHOWN_REGIONS = 3


def dollars(amount: float | None) -> str:
    return "price unknown" if amount is None else f"${amount:.2f}"


def duration(seconds: float) -> str:
    """Return a length of time in the two units that matter."""
    seconds = max(int(seconds), 0)
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds % 60:02} s" if minutes else f"{seconds} s"


def moment(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"


def credentials_end(ends: datetime | None) -> str:
    """Return when credentials end, as a sentence without a full stop; '' if that is more than a day ahead."""
    left = (ends - datetime.now(UTC)).total_seconds() if ends else _DAY + 1
    if ends is None or left > _DAY:
        return ""
    return f"credentials end in {duration(left)}, at {moment(ends)}" if left > 0 else "credentials have ended"


def region_list(names: Sequence[str]) -> str:
    """Return the names of regions; of five or more, the first three and the number of the others."""
    more = len(names) - _SHOWN_REGIONS
    return ", ".join(names) if more < 2 else f"{', '.join(names[:_SHOWN_REGIONS])} and {more} other regions"


def counted(number: int, noun: str) -> str:
    """Return "1 node", "2 nodes"."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def toml(words: Sequence[str]) -> str:
    """Return a list of strings in TOML syntax."""
    return "[" + ", ".join(json.dumps(word, ensure_ascii=False) for word in words) + "]"


def node_list(nodes: Iterable[int]) -> str:
    """Return "node 1", "nodes 0, 1"."""
    ranks = sorted(nodes)
    return ("node " if len(ranks) == 1 else "nodes ") + ", ".join(map(str, ranks))

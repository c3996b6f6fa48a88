"""Times in settings, such as 30m. Pure."""

from __future__ import annotations

import re

MAX_WAIT = 14 * 86400  # seconds
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str) -> float:
    """Return the seconds of a valid time: 0, 45s, 30m, 2h, 1d. 0.0 for anything else."""
    found = re.fullmatch(r"([0-9]+)([smhd])", text)
    return float(int(found[1]) * _UNITS[found[2]]) if found else 0.0

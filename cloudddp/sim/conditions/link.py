"""A wide-area link between the laptop and the nodes: the condition `link`. Pure, standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

MAX_LATENCY = 10.0  # seconds
MAX_MBIT = 100_000.0
_LIMITS = {"latency": MAX_LATENCY, "mbit": MAX_MBIT, "loss": 100.0}
_UNITS = {
    "latency": f"seconds of a round trip, from 0 to {MAX_LATENCY:g} (0.05 is 50 ms)",
    "mbit": f"Mbit/s above 0, at most {MAX_MBIT:g}",
    "loss": "percent from 0 to 100",
}


@dataclass(frozen=True, slots=True)
class Link:
    """Applies to every packet between the laptop and a node, in each direction by itself."""

    latency: float = 0.0  # seconds of a round trip
    mbit: float = 0.0  # 0: not limited
    loss: float = 0.0  # percent of the packets


NAMES = tuple(field.name for field in fields(Link))


def read_setting(name: str, value: object) -> float:
    """Return one setting of a link. Raises ValueError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _LIMITS[name] or (name == "mbit" and value == 0):  # type: ignore[operator]
        raise ValueError(f"expected {_UNITS[name]}, not {json.dumps(value)}")
    return float(value)  # type: ignore[arg-type]

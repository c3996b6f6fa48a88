"""Which EC2 types have which NVIDIA GPU, and how many: for `--gpu H100:8`.

Left out are types with a fraction of a GPU (g6f) and ARM types (g5g, p6e), which cloudddp does not support. A
test compares the table with EC2's own descriptions.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from pathlib import Path


@functools.cache
def table() -> dict[str, dict[str, int]]:
    """Return for each GPU the types that have it, with the number of GPUs."""
    found: dict[str, dict[str, int]] = json.loads(Path(__file__).with_name("gpu_table.json").read_bytes())
    return found


def types(wanted: str) -> tuple[str, ...]:
    """Return the types that have this GPU ("H100": any number of them, "H100:8": 8 on each node), or ()."""
    name, _, count = wanted.upper().partition(":")
    return tuple(one for one, gpus in table().get(name, {}).items() if count in ("", str(gpus)))


def problem(wanted: str) -> tuple[str, str] | None:
    """Return why no type matches, and what to write instead; None if one does."""
    name, _, count = wanted.upper().partition(":")
    if types(wanted):
        return None
    if size := re.fullmatch(r"([A-Z]\w*?\d[A-Z]*?)(\d*X?LARGE|METAL.*|MEDIUM|SMALL|MICRO)", name):
        return f"no instance type is called {wanted}", f"did you mean {'.'.join(size.groups()).lower()}?"
    if name not in table():
        near = " or ".join(difflib.get_close_matches(name, table(), cutoff=0.75))
        known = f"a type such as g5.xlarge, or {', '.join(table())}"
        return f"no instance type has a GPU {name}", f"did you mean {near}?" if near else f"allowed: {known}"
    available = ", ".join(f"{name}:{one}" for one in sorted({*table()[name].values()}))
    return f"no instance type has {count} x {name}", f"available: {available}"

"""Which EC2 types have which NVIDIA GPU, and how many: for `gpu = "H100:8"`. Pure.

Left out are types with a fraction of a GPU (g6f) and ARM types (g5g, p6e), which cloudddp does not support. A
test compares the table with EC2's own descriptions.
"""

from __future__ import annotations

_ONE = "xlarge 2xlarge 4xlarge 8xlarge 16xlarge"
_G5 = {1: _ONE, 4: "12xlarge 24xlarge", 8: "48xlarge"}
_G7 = {1: "2xlarge 4xlarge 8xlarge", 2: "12xlarge", 4: "24xlarge", 8: "48xlarge"}
_P5 = {8: "48xlarge"}
# GPU -> family -> number of GPUs -> sizes
_SIZES: dict[str, dict[str, dict[int, str]]] = {
    "T4": {"g4dn": {1: _ONE, 4: "12xlarge", 8: "metal"}},
    "V100": {"p3": {1: "2xlarge", 4: "8xlarge", 8: "16xlarge"}, "p3dn": {8: "24xlarge"}},
    "A10G": {"g5": _G5},
    "L4": {"g6": _G5, "gr6": {1: "4xlarge 8xlarge"}},
    "L40S": {"g6e": _G5},
    "RTX-PRO-4500": {"g7": _G7},
    "RTX-PRO-6000": {"g7e": _G7},
    "A100": {"p4d": {8: "24xlarge"}},
    "A100-80GB": {"p4de": {8: "24xlarge"}},
    "H100": {"p5": {1: "4xlarge", **_P5}},
    "H200": {"p5en": _P5, "p5e": _P5},
    "B200": {"p6-b200": _P5},
    "B300": {"p6-b300": _P5},
}
_TYPES = {
    name: {
        f"{family}.{size}": count
        for family, sizes in families.items()
        for count, listed in sizes.items()
        for size in listed.split()
    }
    for name, families in _SIZES.items()
}


def types(wanted: str) -> tuple[str, ...]:
    """Return the types that have this GPU ("H100": any number of them, "H100:8": 8 on each node), or ()."""
    name, _, count = wanted.upper().partition(":")
    return tuple(one for one, gpus in _TYPES.get(name, {}).items() if count in ("", str(gpus)))


def problem(wanted: str) -> tuple[str, str] | None:
    """Return why no type matches, and what to write instead; None if one does."""
    if types(wanted):
        return None
    name, _, count = wanted.upper().partition(":")
    if name not in _TYPES:
        return f"no instance type has a GPU {name}", f"known: {', '.join(_TYPES)}"
    available = ", ".join(f"{name}:{one}" for one in sorted(set(_TYPES[name].values())))
    return f"no instance type has {count} x {name}", f"available: {available}"

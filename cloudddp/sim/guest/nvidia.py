"""nvidia-smi, as far as launchers and health checks ask it; every answer says that it is simulated."""

from __future__ import annotations

import sys
from typing import Any

from . import here

_VERSION = "simulated"
_NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest"
    " NVIDIA driver is installed and running. (simulated node: its type has no GPU)"
)


def main(arguments: list[str]) -> int:
    """Answer as nvidia-smi would on a machine with the instance type's GPUs; 9 where it has none."""
    here.require()
    gpus = list(here.facts().get("gpus", []))
    if not gpus:
        print(_NO_DRIVER)
        return 9
    return answer(gpus, arguments)


def answer(gpus: list[dict[str, Any]], arguments: list[str]) -> int:
    """Print what is asked of these GPUs (name, memory_mib, seed); returns the exit code."""
    options = dict(word.partition("=")[::2] for word in arguments if word.startswith("--"))
    if arguments in ([], ["-q"]):
        print(f"NVIDIA-SMI {_VERSION}    Driver Version: {_VERSION}")
        for index, gpu in enumerate(gpus):
            print(f"|  {index}  {gpu['name']} (simulated)   0MiB / {gpu['memory_mib']}MiB |")
        return 0
    if arguments[0] in ("-L", "--list-gpus"):
        for index, gpu in enumerate(gpus):
            print(f"GPU {index}: {gpu['name']} (simulated) (UUID: {_uuid(gpu, index)})")
        return 0
    if "--query-gpu" in options:
        return _query(gpus, _words(options["--query-gpu"]), _words(options.get("--format", "")))
    print(f"nvidia-smi (simulated): {arguments[0]} is not known here", file=sys.stderr)
    return 2


def _words(listed: str) -> list[str]:
    return [word.strip() for word in listed.split(",")]


def _uuid(gpu: dict[str, Any], index: int) -> str:
    return f"GPU-{gpu['seed']:08x}-0000-0000-0000-{index:012x}"


def _query(gpus: list[dict[str, Any]], fields: list[str], form: list[str]) -> int:
    if form[0] != "csv":
        print('Option "--format" is required to be "csv"', file=sys.stderr)
        return 2
    rows = []
    for index, gpu in enumerate(gpus):
        values = {
            "index": (index, ""), "name": (f"{gpu['name']} (simulated)", ""), "gpu_name": (f"{gpu['name']} (simulated)", ""),
            "uuid": (_uuid(gpu, index), ""), "gpu_uuid": (_uuid(gpu, index), ""), "count": (len(gpus), ""),
            "memory.total": (gpu["memory_mib"], "MiB"), "memory.free": (gpu["memory_mib"], "MiB"), "memory.used": (0, "MiB"),
            "utilization.gpu": (0, "%"), "utilization.memory": (0, "%"), "temperature.gpu": (30, ""),
            "power.draw": ("0.00", "W"), "driver_version": (_VERSION, ""), "pci.bus_id": (f"00000000:{index:02X}:00.0", ""),
            "ecc.errors.uncorrected.volatile.total": (0, ""), "compute_mode": ("Default", ""),
        }  # fmt: skip
        unknown = next((name for name in fields if name not in values), None)
        if unknown is not None:
            print(f'Field "{unknown}" is not a valid field to query.')
            return 2
        chosen = [values[name] for name in fields]
        rows.append(
            ", ".join(
                f"{value} {unit}".strip() if "nounits" not in form else str(value) for value, unit in chosen
            )
        )
    if "noheader" not in form:
        units = {
            "memory.total": " [MiB]",
            "memory.free": " [MiB]",
            "memory.used": " [MiB]",
            "utilization.gpu": " [%]",
            "power.draw": " [W]",
        }
        print(", ".join(name + units.get(name, "") for name in fields))
    print("\n".join(rows))
    return 0

"""The commands nvidia-smi and fi_info: the queries that launchers and health checks use, about the node's
devices.

All output says that it is simulated. No program can use a GPU, or send through an EFA device.
"""

from __future__ import annotations

import sys
import time

from . import on_node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_VERSION = "simulated"
_HEADER_UNITS = {
    "memory.total": " [MiB]",
    "memory.free": " [MiB]",
    "memory.used": " [MiB]",
    "utilization.gpu": " [%]",
    "power.draw": " [W]",
}
_NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest"
    " NVIDIA driver is installed and running. (simulated node: the instance type has no GPU)"
)

# Of a GPU that has fallen off the bus (exit code 15 in nvidia-smi's manual); the others are listed.
LOST = "Unable to determine the device handle for GPU {}: Unknown Error"
LOST_CODE = 15

_NO_DATA = 61  # ENODATA, of which fi_info makes its exit status
_ENDPOINTS = (("rdm", "FI_EP_RDM", "FI_PROTO_EFA"), ("dgrm", "FI_EP_DGRAM", "FI_PROTO_EFA"))


def nvidia_smi(arguments: list[str]) -> int:
    """Print what nvidia-smi prints for the instance's GPUs. Returns its exit code: 9 without a GPU."""
    on_node.require()
    facts = on_node.facts()
    gpus = list(facts.get("gpus", []))
    if not gpus:
        print(_NO_DRIVER)
        return 9
    lost = min(int(facts.get("boot", {}).get("failed_gpus", 0)), len(gpus))
    code = answer_nvidia_smi(gpus[: len(gpus) - lost], arguments) if lost < len(gpus) or not lost else 0
    for index in range(len(gpus) - lost, len(gpus)):
        print(LOST.format(f"00000000:{index:02X}:00.0"))
    return LOST_CODE if lost else code


def answer_nvidia_smi(gpus: list[dict[str, Any]], arguments: list[str]) -> int:
    """Print the answer for these GPUs (name, memory_mib, seed). Returns the exit code."""
    options = dict(argument.partition("=")[::2] for argument in arguments if argument.startswith("--"))
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
        fields, form = _split(options["--query-gpu"]), _split(options.get("--format", ""))
        code = _query(gpus, fields, form)
        while "-lms" in arguments and not code:
            sys.stdout.flush()
            time.sleep(int(arguments[arguments.index("-lms") + 1]) / 1000)
            code = _query(gpus, fields, form)
        return code
    print(f"nvidia-smi (simulated): unsupported: {arguments[0]}", file=sys.stderr)
    return 2


def _split(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")]


def _uuid(gpu: dict[str, Any], index: int) -> str:
    return f"GPU-{gpu['seed']:08x}-0000-0000-0000-{index:012x}"


def _values(gpus: list[dict[str, Any]], index: int) -> dict[str, tuple[Any, str]]:
    """Return value and unit of each field of one GPU."""
    gpu = gpus[index]
    name, uuid, memory = f"{gpu['name']} (simulated)", _uuid(gpu, index), gpu["memory_mib"]
    return {
        "index": (index, ""),
        "count": (len(gpus), ""),
        "name": (name, ""),
        "gpu_name": (name, ""),
        "uuid": (uuid, ""),
        "gpu_uuid": (uuid, ""),
        "pci.bus_id": (f"00000000:{index:02X}:00.0", ""),
        "memory.total": (memory, "MiB"),
        "memory.free": (memory, "MiB"),
        "memory.used": (0, "MiB"),
        "utilization.gpu": (0, "%"),
        "utilization.memory": (0, "%"),
        "temperature.gpu": (30, ""),
        "power.draw": ("0.00", "W"),
        "driver_version": (_VERSION, ""),
        "compute_mode": ("Default", ""),
        "ecc.errors.uncorrected.volatile.total": (0, ""),
    }


def _query(gpus: list[dict[str, Any]], fields: list[str], form: list[str]) -> int:
    if form[0] != "csv":
        print('Option "--format" is required to be "csv"', file=sys.stderr)
        return 2
    rows = []
    for index in range(len(gpus)):
        values = _values(gpus, index)
        unknown = next((name for name in fields if name not in values), None)
        if unknown is not None:
            print(f'Field "{unknown}" is not a valid field to query.')
            return 2
        cells = [values[name] for name in fields]
        with_units = "nounits" not in form
        rows.append(", ".join(f"{value} {unit if with_units else ''}".strip() for value, unit in cells))
    if "noheader" not in form:
        print(", ".join(name + _HEADER_UNITS.get(name, "") for name in fields))
    print("\n".join(rows))
    return 0


def fi_info(arguments: list[str]) -> int:
    """Print what `fi_info -p efa` prints for the EFA interfaces of the instance. Returns its exit code."""
    on_node.require()
    return _answer_fi_info(int(on_node.facts().get("efa_devices", 0)), arguments)


def _answer_fi_info(devices: int, arguments: list[str]) -> int:
    """Print two endpoints for each device, as libfabric's provider for EFA has them; `-t TYPE` selects one of
    them.
    """
    pairs = dict(zip(arguments[::2], arguments[1::2], strict=False))
    if len(arguments) % 2 or not pairs.keys() <= {"-p", "-t"}:
        print(f"fi_info (simulated): unsupported: {' '.join(arguments)}", file=sys.stderr)
        return 2
    found = [one for one in _ENDPOINTS if pairs.get("-t", one[1]) == one[1]]
    if not devices or not found or pairs.get("-p", "efa") != "efa":
        print("fi_getinfo: -61 (No data available)")
        return _NO_DATA
    for index in range(devices):
        for suffix, endpoint, protocol in found:
            print(
                f"provider: efa\n    fabric: efa\n    domain: rdmap{16 + index}s27-{suffix}\n    version: "
                "0.0\n"
                f"    type: {endpoint}\n    protocol: {protocol}"
            )
    return 0

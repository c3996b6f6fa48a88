"""What a node is like that ranks will depend on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import Counter
from pathlib import Path

from agent.node.commands import later, run_quietly
from agent.node.shared_memory import mark_start
from agent.ranks import causes
from cloudddp.agent.protocol.gang import MAX_FACT, NodeFacts

SECONDS = 20.0  # for each program that is asked
LEAST_DISK = 1 << 28  # bytes
LEAST_SHM = 1 << 25  # bytes: data loaders pass batches through /dev/shm, and NCCL and gloo their buffers
NVSWITCH = "/dev/nvidia-nvswitch0"  # on machines whose GPUs the fabric manager connects
# Errors that need a reset of the GPU or a new machine (NVIDIA, "XID Errors", and AWS's guides for P4d and
# P5).
FATAL_XIDS = frozenset(
    (46, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 136, 140, 143, 145, 149, 154, 155)
)
KINDS = ("python", "torch", "cuda", "nccl")
# By the names of folders: importlib.metadata reads the description of each package, and importing torch takes
# seconds.
VERSIONS = """
import json, os, re, sys
found = {"python": "%d.%d.%d" % sys.version_info[:3]}
for folder in sys.path:
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        match = re.match(r"(torch|nvidia_nccl_cu[0-9]+)-([^-]+)[.](dist|egg)-info", name)
        if match:
            found.setdefault("torch" if match[1] == "torch" else "nccl", match[2])
    version = os.path.join(folder, "torch", "version.py")
    if "cuda" not in found and os.path.isfile(version):
        with open(version) as file:
            cuda = re.search(r"^cuda\\b[^=]*= *'([^']*)'", file.read(), re.M)
        found["cuda"] = cuda[1] if cuda else ""
print(json.dumps(found))
"""


def facts(command: list[str], home: Path) -> NodeFacts:
    """Return what this node is like. `command` prints VERSIONS. Missing programs and packages give ''."""
    asked = later(lambda: run_quietly(command, SECONDS))
    gpus, driver = _gpus()
    defects = _defects(home)
    versions: dict[str, str] = {}
    with contextlib.suppress(ValueError):
        found = json.loads(asked() or "{}")
        versions = {key: str(found.get(key, ""))[:MAX_FACT] for key in KINDS}
    mark_start("preflight")
    return NodeFacts(gpus=gpus, driver=driver, defects=defects, **versions)


def _gpus() -> tuple[str, str]:
    """Return the GPUs, as `8 x NVIDIA H100`, and the driver's version."""
    if shutil.which("nvidia-smi") is None:
        return "", ""
    listed = run_quietly(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], SECONDS)
    rows = [[part.strip() for part in line.split(",")] for line in listed.splitlines() if "," in line]
    names = Counter(row[0] for row in rows)
    shown = ", ".join(f"{count} x {name}" for name, count in sorted(names.items()))
    return shown[:MAX_FACT], (rows[0][1] if rows else "")[:MAX_FACT]


def _defects(home: Path) -> tuple[str, ...]:
    """Return what is wrong with this node by itself."""
    found = []
    shared_memory = "/dev/shm"  # noqa: S108  looked at, never written
    for path, least in ((str(home), LEAST_DISK), (shared_memory, LEAST_SHM)):
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(path).free
            if free < least:
                found.append(f"{path} has {free >> 20} MiB free, and needs {least >> 20}")
    if os.path.exists(NVSWITCH):
        state = run_quietly(["systemctl", "is-active", "nvidia-fabricmanager"], SECONDS, partly=True).strip()
        if state != "active":
            found.append(f"nvidia-fabricmanager, which connects the GPUs, is {state or 'not installed'}")
    if xids := _fatal_xids():
        found.append(f"the NVIDIA driver has logged {', '.join(xids)} since the boot")
    return tuple(one[:MAX_FACT] for one in found)


def _fatal_xids() -> list[str]:
    found = {(match[2], match[1]) for match in map(causes.XID.search, causes.driver_log(SECONDS)) if match}
    return sorted(f"Xid {number} ({device})" for number, device in found if int(number) in FATAL_XIDS)[:5]

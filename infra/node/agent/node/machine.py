"""What the agent detects about the machine: interface, GPUs, Python, ports, boot."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import socket
import struct
import time
from pathlib import Path

from agent.node.commands import program, run_quietly, succeeds

SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h
NVIDIA_SMI_SECONDS = 120.0  # the first call on a cold node loads the driver, which may take seconds per GPU
EFA_FI_INFO = "/opt/amazon/efa/bin/fi_info"  # of AWS's EFA installer; on PATH in login shells only
INFINIBAND = "/sys/class/infiniband"
PORTS = range(10_000, 32_768)  # below those of connections (ip_local_port_range)
DEEP_LEARNING_AMI_PYTHON = "/opt/pytorch/bin/python"


def interface_of(address: str) -> str:
    """Return the name of the interface that has an IPv4 address, or ''.

    Asks the kernel, so that it needs no iproute2. A loopback interface has all addresses of its network:
    127.77.0.4 is on `lo` though `lo` lists 127.0.0.1/8.
    """
    wanted = struct.unpack("!I", socket.inet_aton(address))[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                own = struct.unpack("!I", fcntl.ioctl(asked, SIOCGIFADDR, request)[20:24])[0]
                mask = struct.unpack("!I", fcntl.ioctl(asked, SIOCGIFNETMASK, request)[20:24])[0]
            except OSError:
                continue  # an interface without an IPv4 address
            if own == wanted or (own >> 24 == 127 and own & mask == wanted & mask):
                return name
    return _secondary_interface_of(address)


def _secondary_interface_of(address: str) -> str:
    """SIOCGIFADDR returns only the first address of an interface, `ip` all."""
    for line in run_quietly(["ip", "-o", "-4", "addr", "show"]).splitlines():
        words = line.split()
        if len(words) > 3 and words[3].split("/")[0] == address:
            return words[1]
    return ""


def count_gpus(expected: int, seconds: float) -> int:
    """Return how many GPUs `nvidia-smi -L` lists. While it lists fewer than `expected`, it is called again
    for up to `seconds`: drivers show GPUs one after another. If a GPU is lost, nvidia-smi exits with 15 and
    lists the others."""
    deadline = time.monotonic() + seconds
    while True:
        listed = run_quietly(["nvidia-smi", "-L"], NVIDIA_SMI_SECONDS, partly=True).splitlines()
        count = sum(line.startswith("GPU ") for line in listed)
        if count >= expected or shutil.which("nvidia-smi") is None or time.monotonic() > deadline:
            return count
        time.sleep(min(2.0, seconds))


def count_efa() -> int:
    """Return how many EFA devices the node has.

    Counted are those that libfabric can use, as NCCL's plugin will; without libfabric, those that the kernel
    has. A device has several endpoints, whose domains differ in the last part: rdmap16s27-rdm,
    rdmap16s27-dgrm.
    """
    fi_info = EFA_FI_INFO if os.access(EFA_FI_INFO, os.X_OK) else shutil.which("fi_info")
    if fi_info is None:
        return sum(_is_efa(device) for device in Path(INFINIBAND).glob("*"))
    listed = run_quietly([fi_info, "-p", "efa", "-t", "FI_EP_RDM"]).splitlines()
    domains = {
        line.split()[1] for line in listed if line.split()[:1] == ["domain:"] and len(line.split()) > 1
    }
    return len({domain.rpartition("-")[0] or domain for domain in domains})


def _is_efa(device: Path) -> bool:
    with contextlib.suppress(OSError):
        return (device / "device" / "driver").resolve().name == "efa"
    return False


def find_python(wanted: str, folder: Path) -> str:
    """Return the Python for the ranks, or '': the requested one, or the Deep Learning AMI's, or the one on
    PATH."""
    if wanted:
        return shutil.which(program(wanted, folder)) or ""
    image = DEEP_LEARNING_AMI_PYTHON
    return image if os.access(image, os.X_OK) else (shutil.which("python3") or "")


def free_ports() -> tuple[int, int]:
    """Return two ports on which nobody listens, and which no connection gets as its own meanwhile."""
    found: list[int] = []
    for port in random.sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("", port))
            found.append(port)
    return found[0], found[1]


def wait_for_boot(seconds: float) -> None:
    """Wait until cloud-init has finished: SSH answers before the deadline timer is armed."""
    succeeds(["cloud-init", "status", "--wait"], seconds)

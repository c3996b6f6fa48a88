"""What the agent detects about the machine: interface, GPUs, Python, ports, boot."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import re
import shutil
import socket
import struct
import time
from array import array
from pathlib import Path

from agent.node.commands import program, run_quietly

SIOCGIFCONF = 0x8912  # linux/sockios.h
# The name of an interface, perhaps with a label, and one of its addresses.
IFREQ = struct.Struct("16s4x4s16x")
MAX_ADDRESSES = 1000
NVIDIA_SMI_SECONDS = 120.0  # the first call on a cold node loads the driver, which may take seconds per GPU
EFA_FI_INFO = "/opt/amazon/efa/bin/fi_info"  # of AWS's EFA installer; on PATH in login shells only
INFINIBAND = "/sys/class/infiniband"
PORTS = range(10_000, 32_768)  # below those of connections (ip_local_port_range)
DEEP_LEARNING_AMI_PYTHON = "/opt/pytorch/bin/python"


def interface_of(address: str) -> str:
    """Return the name of the interface that has an IPv4 address, or ''.

    Asks the kernel (netdevice(7)), so that it needs no iproute2. A loopback interface has all addresses of
    its network: 127.77.0.4 is on `lo` though `lo` lists 127.0.0.1/8.
    """
    listed = array("B", bytes(MAX_ADDRESSES * IFREQ.size))
    place, room = listed.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, SIOCGIFCONF, struct.pack("iP", room, place))
    size, _ = struct.unpack("iP", answer)
    found = {
        socket.inet_ntoa(own): name.partition(b"\0")[0].partition(b":")[0].decode()
        for name, own in IFREQ.iter_unpack(listed.tobytes()[:size])
    }
    return found.get(address) or (found.get("127.0.0.1", "") if address.startswith("127.") else "")


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
        drivers = [os.path.realpath(device / "device" / "driver") for device in Path(INFINIBAND).glob("*")]
        return sum(os.path.basename(driver) == "efa" for driver in drivers)
    listed = run_quietly([fi_info, "-p", "efa", "-t", "FI_EP_RDM"])
    domains = re.findall(r"^[ \t]*domain:[ \t]*(\S+)", listed, re.MULTILINE)
    return len({domain.rpartition("-")[0] or domain for domain in domains})


def find_python(wanted: str, folder: Path) -> str:
    """Return the Python for the ranks, or '': the requested one, the Deep Learning AMI's, or that on PATH."""
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

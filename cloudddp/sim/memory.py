"""How much of this computer's memory a node may take: its disks are memory here.

EC2's sizes are what the API shows; what a node really gets is bounded, so that one node that fills its own leaves
this computer most of what it has. Standard library only; knows no nodes.
"""

from __future__ import annotations

import os
from pathlib import Path

_SHARE = 4  # of what is available when a node boots, a quarter is the most for its disk: one mishap is then harmless
_SHARED_MEMORY_SHARE = 8
_LEAST = 64 << 20
_BYTES_PER_FILE = 16384  # as ext4 reckons: a file takes about 1 KiB of memory that no size counts
_FEWEST_FILES = 4096


def for_disk(asked: int) -> int:
    """How many bytes a disk gets of those it is to have."""
    return min(asked, max(_available() // _SHARE, _LEAST))


def for_shared_memory() -> int:
    """How many bytes /dev/shm gets."""
    return max(_available() // _SHARED_MEMORY_SHARE, _LEAST)


def limits(size: int, mode: str) -> str:
    """The options of a tmpfs of `size` bytes."""
    return f"mode={mode},size={size},nr_inodes={max(size // _BYTES_PER_FILE, _FEWEST_FILES)}"


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

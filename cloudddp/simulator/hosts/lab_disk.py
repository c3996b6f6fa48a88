"""The sizes of a node's disks in memory. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

# A node's disks are memory. The API shows EC2's sizes; the actual ones are bounded, so that a node that fills
# its disk leaves this computer most of its memory.
_DISK_SHARE = 4  # a disk gets at most a quarter of the memory that is available when the node boots
_SHARED_MEMORY_SHARE = 8
_MINIMUM = 64 << 20
_BYTES_PER_INODE = 16384  # as ext4; a file uses about 1 KiB of memory that tmpfs does not count
_MINIMUM_INODES = 4096


def size(requested: int) -> int:
    """Return the size in bytes for a disk that should have `requested` bytes."""
    return min(requested, max(_available() // _DISK_SHARE, _MINIMUM))


def shared_memory_size() -> int:
    """Return the size of /dev/shm in bytes."""
    return max(_available() // _SHARED_MEMORY_SHARE, _MINIMUM)


def tmpfs_options(size: int, mode: str) -> str:
    """Return the mount options for a tmpfs of `size` bytes."""
    return f"mode={mode},size={size},nr_inodes={max(size // _BYTES_PER_INODE, _MINIMUM_INODES)}"


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

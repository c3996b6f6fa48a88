"""Programs, and other files of packages, that the simulator needs on this computer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

LAB = {"sshd": "openssh-server", "ip": "iproute2", "nft": "nftables", "ssh-keygen": "openssh-client"}
"""Program -> Debian package that nodes in the lab need."""

SYSTEM_FOLDERS = "/usr/sbin:/sbin"  # Debian's ordinary users do not have them on PATH


def search_path() -> str:
    return f"{os.environ.get('PATH', '')}:{SYSTEM_FOLDERS}"


def missing(packages: Mapping[str, str]) -> str:
    """Return a sentence about the packages to install; '' for none. `packages` maps a program, or the
    absolute path of a file, to its Debian package."""
    names = [package for name, package in packages.items() if not _exists(name)]
    is_missing = f"{'are' if names[1:] else 'is'} not installed"
    return f"{' and '.join(names)} {is_missing} (apt-get install {' '.join(names)})" if names else ""


def _exists(name: str) -> bool:
    if name.startswith("/"):
        return Path(name).is_file()
    return shutil.which(name, path=search_path()) is not None

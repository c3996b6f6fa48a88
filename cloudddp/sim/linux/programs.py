"""Which of the files that the simulator needs are installed on this computer, most of them programs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

SYSTEM_FOLDERS = "/usr/sbin:/sbin"  # Debian's ordinary users do not have them on PATH


def search_path() -> str:
    return f"{os.environ.get('PATH', '')}:{SYSTEM_FOLDERS}"


def missing(packages: Mapping[str, str]) -> str:
    """Return a sentence about the packages to install; '' for none. `packages`: by a program of each, or an
    absolute path."""
    names = [
        package
        for name, package in packages.items()
        if shutil.which(name, path=search_path()) is None and not Path("/", name).is_file()
    ]
    return f"{' and '.join(names)} not installed (apt-get install {' '.join(names)})" if names else ""

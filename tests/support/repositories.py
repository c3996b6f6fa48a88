"""Git repositories of tests, independent of the developer's configuration of git."""

from __future__ import annotations

import subprocess
from pathlib import Path

_TIMEOUT = 300  # a hang guard, not a measurement


def git(folder: Path, *arguments: str) -> None:
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always"]
    subprocess.run(
        ["git", "-C", str(folder), *settings, *arguments], check=True, capture_output=True, timeout=_TIMEOUT
    )

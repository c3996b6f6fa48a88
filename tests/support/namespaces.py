"""Commands as root in namespaces of their own: for root, and for users who may create user namespaces."""

from __future__ import annotations

import os
import subprocess

from support.harness import cannot


def as_root(*kinds: str) -> list[str]:
    """Return what a command has to follow to run as root in new namespaces, such as `--mount`. Skip the test
    where they are refused."""
    user = () if os.getuid() == 0 else ("--user", "--map-root-user")
    words = ["unshare", *user, *kinds]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        cannot("namespaces are refused")
    return words

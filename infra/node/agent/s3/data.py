"""[[data]] from S3: where a copy is on this node, the process that makes it (download.py), and its link in
the project.

It is on the fastest disk: instance storage, which the Deep Learning AMIs mount at /opt/dlami/nvme, else the
root volume. The link is replaced, so that a later launch may name another prefix.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from agent.files import paths
from agent.s3 import boto_process
from cloudddp.agent.protocol.start import DataCopy

INSTANCE_STORE = Path("/opt/dlami/nvme")
FOLDER = "cloudddp-data"


def link_folder(copy: DataCopy, project: Path) -> Path:
    """Create the folder of a copy, and link the project's path to it. Raises OSError, also where the project
    has something else there."""
    digest = hashlib.sha256(f"{copy.bucket}/{copy.prefix}".encode()).hexdigest()[:12]
    folder = _disk() / FOLDER / f"{Path(copy.path).name}-{digest}"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    paths.link_to(project, copy.path, folder, "[[data]]")
    return folder


def _disk() -> Path:
    if INSTANCE_STORE.is_mount() and os.access(INSTANCE_STORE, os.W_OK):
        return INSTANCE_STORE
    return Path.home()


def request(copy: DataCopy, folder: Path) -> bytes:
    """Return the stdin of the process that copies."""
    wanted = {
        "bucket": copy.bucket,
        "prefix": copy.prefix,
        "region": boto_process.region(),
        "folder": str(folder),
    }
    return json.dumps(wanted).encode()

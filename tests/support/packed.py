"""What `pack` sends, as the laptop receives it."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.agentnode import Node
from support.localsync import LocalNode, LocalRunner

from cloudddp.agent.protocol.file_steps import PackRequest
from cloudddp.job.results.pull import pull


@dataclass
class Sent:
    """Contents, or `-> target`, of files and links, and times in ns, by name. `notes` are the lines
    for the user, `lost` the results that were left out, and why, or None for too many of them."""

    files: dict[str, str] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lost: dict[str, str] | None = None


def packed(node: Node, *paths: str, **more: Any) -> Sent:
    """Return what arrives of these paths of the project `p`."""
    return sent(node, PackRequest("p", paths or ("runs",), **more))


def sent(node: Node, request: PackRequest) -> Sent:
    """Return what arrives in an empty folder."""
    base = Path(tempfile.mkdtemp(dir=node.home.parent))
    pulled = pull(LocalRunner({0: LocalNode(node.home)}), request, node=0, to=base)
    found = Sent(notes=list(pulled.notes))
    found.lost = None if pulled.left is None else {one.name: one.reason for one in pulled.left}
    for folder, folders, names in os.walk(base):
        if len(folder) > 3000:  # what is below it has too long a path
            folders.clear()
            continue
        for path in (Path(folder, name) for name in (*folders, *names)):
            name = path.relative_to(base).as_posix()
            if path.is_symlink():
                found.files[name] = f"-> {path.readlink()}"
            elif path.name in names:
                found.files[name] = path.read_bytes().decode("latin-1")
                found.times[name] = path.stat().st_mtime_ns
    shutil.rmtree(base)
    return found

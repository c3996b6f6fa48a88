"""`restore`: write a snapshot that another node holds, from stdin."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys

from agent import files, store
from cloudddp.agent.protocol.snapshots import RestoreReply, RestoreRequest

REQUEST = RestoreRequest
PIECE = 1 << 20  # bytes


def step(request: RestoreRequest) -> RestoreReply:
    """The file appears under its name once it is complete."""
    folder = store.project_folder(request.project)
    path = files.replaceable(folder, request.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.cloudddp-tmp")
    found, left = hashlib.sha256(), request.size
    try:
        with open(temporary, "wb") as target:
            while left and (piece := sys.stdin.buffer.read(min(left, PIECE))):
                found.update(piece)
                target.write(piece)
                left -= len(piece)
            target.flush()
            os.fsync(target.fileno())
        if left:
            raise SystemExit(f"the stream of {request.path!r} ended {left} bytes too early")
        os.utime(temporary, ns=(request.mtime_ns, request.mtime_ns))
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return RestoreReply(found.hexdigest())

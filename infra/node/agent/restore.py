"""`restore`: write a snapshot that another node holds, from stdin."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable

from agent import files, store
from cloudddp.agent.protocol.snapshots import RestoreReply, RestoreRequest

REQUEST = RestoreRequest
PIECE = 1 << 20  # bytes


def step(request: RestoreRequest) -> RestoreReply:
    return RestoreReply(write(request, sys.stdin.buffer.read))


def write(request: RestoreRequest, read: Callable[[int], bytes], *, digest: str = "") -> str:
    """Write what `read` returns, and return its SHA-256. The file appears under its name once it is complete, and has that
    `digest` if one is given. Raises OSError, and SystemExit for anything else that is not as announced."""
    folder = store.project_folder(request.project)
    path = files.replaceable(folder, request.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.cloudddp-tmp")
    found, left = hashlib.sha256(), request.size
    try:
        with open(temporary, "wb") as target:
            while left and (piece := read(min(left, PIECE))):
                found.update(piece)
                target.write(piece)
                left -= len(piece)
            target.flush()
            os.fsync(target.fileno())
        if left:
            raise SystemExit(f"the stream of {request.path!r} ended {left} bytes too early")
        if digest and found.hexdigest() != digest:
            raise SystemExit(f"{request.path!r} was damaged on its way")
        os.utime(temporary, ns=(request.mtime_ns, request.mtime_ns))
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return found.hexdigest()

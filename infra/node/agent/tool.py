"""`tool`: take py-spy from the laptop, for nodes without a way to a package index."""

from __future__ import annotations

import hashlib
import os
import sys
import zlib

from agent import py_spy
from cloudddp.agent.protocol.stacks import MAX_TOOL, ToolReply, ToolRequest

REQUEST = ToolRequest


def step(request: ToolRequest) -> ToolReply:
    try:
        data = zlib.decompressobj().decompress(sys.stdin.buffer.read(request.size), MAX_TOOL)
    except zlib.error:
        data = b""
    if hashlib.sha256(data).hexdigest() != request.digest:
        raise SystemExit("py-spy did not arrive whole")
    path = py_spy.shipped()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700), "wb") as file:
        file.write(data)
    os.replace(temporary, path)
    return ToolReply()

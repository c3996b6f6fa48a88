"""NCCL's RAS: from 2.24 on, a thread of each process answers on localhost:28028 or NCCL_RAS_ADDR what is
known of all ranks. The protocol is lines of text (NCCL, src/ras/client_support.cc), and the report a text for
people, which differs a little between versions (docs, "RAS"). It is kept whole.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from pathlib import Path

from cloudddp.agent.protocol.stacks import MAX_SENTENCE

ADDRESS = re.compile(rb"(?:^|\0)NCCL_RAS_ADDR=\[?([^\0]*?)\]?:(\d{1,7})(?:\0|$)")
HOST, PORT = "localhost", 28028
SECONDS = 5.0  # for the report; of these RAS may wait 3 for other processes
MAX_BYTES = 1 << 18
ERRORS = "\nErrors\n"  # begins the part of a report that is about errors and warnings


def address(pid: int) -> tuple[str, int]:
    """Return where RAS listens, by the environment in which a rank was started."""
    with contextlib.suppress(OSError):
        if found := ADDRESS.search(Path(f"/proc/{pid}/environ").read_bytes()):
            return os.fsdecode(found[1]) or HOST, int(found[2])
    return HOST, PORT


def ask(host: str, port: int) -> str:
    """Return the report, '' where nothing listens there, or something else does. It may be cut."""
    deadline, data = time.monotonic() + SECONDS, bytearray()
    # A timeout: what has come may still say something.
    with contextlib.suppress(OSError, ValueError), socket.create_connection((host, port), SECONDS) as server:
        server.sendall(b"TIMEOUT 3\nVERBOSE STATUS\n")
        while len(data) < MAX_BYTES and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            if not (piece := server.recv(1 << 16)):
                break
            data += piece
    text = data.decode(errors="replace").removeprefix("OK\n")
    return text if ERRORS in text else ""


def summary(report: str) -> str:
    """Return the errors and warnings of a report, without processes and GPUs; '' for none. Pure."""
    if not report:
        return ""
    lines = report.partition(ERRORS)[2].splitlines()
    found = [line.partition(" -- ")[0].strip() for line in lines if line.strip(" =") not in ("", "Warnings")]
    return f"NCCL RAS: {'; '.join(found) or 'no rank is missing, and none is behind'}"[:MAX_SENTENCE]

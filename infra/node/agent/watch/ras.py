"""NCCL's RAS: what the ranks of a job know of each other's collectives.

From NCCL 2.24 on, a thread of each process answers on localhost:28028 or NCCL_RAS_ADDR, for the whole job.
The protocol is lines of text (NCCL, src/ras/client.cc), and the report a text for people, which differs a
little between versions (docs, "RAS"; src/ras/client_support.cc). It is kept whole.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from pathlib import Path

from cloudddp.agent.protocol.stacks import MAX_SENTENCE, named_ranks

VARIABLE = b"NCCL_RAS_ADDR="
HOST, PORT = "localhost", 28028
SECONDS = 5.0  # for everything; of these RAS may wait 3 for other processes
MAX_BYTES = 1 << 18
MAX_PARTS, MAX_NAMED = 4, 64
TITLE = re.compile(r"(#\d+-\d+ )?(\([0-9a-f]+\) )?(INCOMPLETE|ERROR|MISMATCH|DEAD)$")
RANK = re.compile(r"Rank (\d{1,7}) -- ")


def address(pid: int) -> tuple[str, int]:
    """Return where RAS listens, by the environment in which a rank was started."""
    with contextlib.suppress(OSError, ValueError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(VARIABLE):
                host, _, port = entry[len(VARIABLE) :].decode().strip().rpartition(":")
                return host.strip("[]") or HOST, int(port)
    return HOST, PORT


def ask(host: str, port: int) -> str:
    """Return the report, '' where nothing listens there, or something else does. It may be cut."""
    deadline, data = time.monotonic() + SECONDS, bytearray()
    # A timeout: what has come may still say something.
    with contextlib.suppress(OSError, ValueError), socket.create_connection((host, port), SECONDS) as server:
        server.sendall(b"CLIENT PROTOCOL 2\n")
        while len(data) < MAX_BYTES and time.monotonic() < deadline:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            had_line = b"\n" in data
            if not (piece := server.recv(1 << 16)):
                break
            data += piece
            if not had_line and b"\n" in data and data.startswith(b"SERVER PROTOCOL "):
                server.sendall(b"TIMEOUT 3\nVERBOSE STATUS\n")
    hello, _, text = data.decode(errors="replace").partition("\n")
    return text.removeprefix("OK\n") if hello.startswith("SERVER PROTOCOL ") else ""


def summary(text: str) -> str:
    """Return the errors and warnings of a report in a sentence; '' where a text is none of RAS. Pure."""
    if "Communicators..." not in text:
        return ""
    found: list[list[str]] = []
    for line in text.splitlines():
        if title := TITLE.match(line):
            found.append([f"{title[1] or ''}{title[3]}"])
        elif line.startswith("  ") and found and found[-1]:
            found[-1].append(line.strip())
        elif line.strip() and found:
            found.append([])  # another section
    parts = [_part(lines) for lines in found if lines] or ["no rank is missing, and none is behind"]
    return f"NCCL RAS: {'; '.join(parts[:MAX_PARTS])}"[:MAX_SENTENCE]


def _part(lines: list[str]) -> str:
    """Return what is said of one communicator: without processes and GPUs, and with the ranks in one list."""
    said: list[tuple[str, list[int]]] = []
    for line in lines:
        if said and (rank := RANK.match(line)):
            said[-1][1].append(int(rank[1]))
        else:
            said.append((line.partition(" -- ")[0], []))
    texts = [f"{text}: {named_ranks(sorted(ranks)[:MAX_NAMED])}" if ranks else text for text, ranks in said]
    return f"{texts[0]}: {', '.join(texts[1 : 1 + MAX_PARTS])}"

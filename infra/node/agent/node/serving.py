"""Files from one node to another, on a connection between their agents: the node that lacks some says which,
and gets them as frames (protocol/transfer.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

from agent.node.link import Link, LinkError
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.manifest import Entry
from cloudddp.agent.protocol.receiving import Receiver
from cloudddp.agent.protocol.sending import FileRequest, Sender, as_missing
from cloudddp.agent.protocol.transfer import Wants

ALIVE = 5.0  # seconds without anything to send
STUCK = 600.0  # seconds in which a node only says that it is alive; the laptop waits longer


def serve(
    link: Link,
    secret: str,
    folder: Path,
    files: Sequence[tuple[str, Entry]],
    locate: Callable[[str], str] = str,
) -> None:
    """Send what a node asks for of these files below the folder. One that is not there, or for which `locate`
    raises OSError, is said to be missing. Raises what link.REFUSED names, and EOFError."""
    key = secret.encode()
    wants = transfer.read_wants(transfer.read_frame(link.read_all, key))
    wanted = [FileRequest(number, files[number][0], known) for number, known in wants.of(files)]
    last = time.monotonic()
    for data in Sender(str(folder), key, on_lost=as_missing, locate=locate).frames(wanted):
        if data:
            link.write_all(data)
        elif time.monotonic() - last > ALIVE:  # it hashes what the other node has
            link.write_all(transfer.frame(key, transfer.ALIVE))
        else:
            continue
        last = time.monotonic()
    link.write_all(transfer.frame(key, transfer.DONE))


def fetch(link: Link, secret: str, wants: Wants, receiver: Receiver) -> None:
    """Ask for files, and pass what comes to the receiver. Raises what link.REFUSED names, and EOFError."""
    key, last = secret.encode(), time.monotonic()
    link.write_all(wants.frame(key))
    while (frame := transfer.read_frame(link.read_all, key)).kind != transfer.DONE:
        if frame.kind != transfer.ALIVE:
            receiver.take(frame)
            last = time.monotonic()
        elif time.monotonic() - last > STUCK:
            raise LinkError(f"it has sent nothing for {STUCK:.0f} s")
    receiver.done()

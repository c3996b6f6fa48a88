"""A program in the place of the agent's `receive` on a node: `impostor.py ATTACK`, run as the login user
could."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def in_place_of_receive(attack: str) -> str:
    """Return the program that runs a node's commands, for LocalRunner.wrap: all but `receive` are the
    agent's."""
    impostor = shlex.join([sys.executable, "-I", __file__, attack])
    script = f'case "$3" in *" receive") exec {impostor};; *) exec "$@";; esac'
    return f"sh -c {shlex.quote(script)} sh"


def forged_probe(folders: Path | None) -> str:
    """Return the program that adds folders, in a JSON file, to the replies of a node to `probe`."""
    if folders is None:
        return ""
    merge = (
        "import json, sys; reply = json.loads(sys.stdin.read().splitlines()[-1]); "
        f"reply['folders'] = {{**(reply['folders'] or {{}}), **json.load(open({str(folders)!r}))}}; "
        "print(json.dumps(reply))"
    )
    forge = shlex.join([sys.executable, "-I", "-c", merge])
    script = f'case "$3" in *"/agent-"*" probe"*) "$@" | {forge};; *) exec "$@";; esac'
    return f"sh -c {shlex.quote(script)} sh"


def write(data: bytes) -> None:
    os.write(1, data)


def repeat(*pieces: bytes, every: float = 0.2) -> None:
    """Write the pieces one after the other, the last one again and again, until nobody reads."""
    for piece in itertools.chain(pieces, itertools.repeat(pieces[-1])):
        write(piece)
        time.sleep(every)


def drain() -> None:
    while os.read(0, 1 << 16):
        pass


def serve_nothing(request: dict[str, Any]) -> None:
    """Serve the other nodes with frames that say that this one is alive."""
    sys.path[:0] = [str(ROOT), str(ROOT / "infra" / "node")]
    from agent.node.link import Link
    from cloudddp.agent.protocol import transfer

    secret = str(request["secret"])
    first: dict[str, Any] = request["first"]
    listener = socket.create_server((first["address"], first["port"]))

    def serve(connection: socket.socket) -> None:
        link = Link(connection, secret, "sync")
        link.accept()
        while True:
            link.write_all(transfer.frame(secret.encode(), transfer.ALIVE))
            time.sleep(0.2)

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def in_thread(work: Callable[[], object]) -> None:
    threading.Thread(target=work, daemon=True).start()


def main(attack: str) -> None:
    request = json.loads(sys.stdin.buffer.raw.readline())
    if attack != "never reads":
        in_thread(drain)
    if attack in ("alive, done", "alive"):
        in_thread(lambda: serve_nothing(request))
        time.sleep(0.3)
    begins = {
        "empty reports": [b"{}\n"],
        "never reads": [b"{}\n"],
        "done, and goes on": [b'{"stage": 2}\n', b'{"done": {}}\n', b"{}\n"],
        "alive, done": [b'{"done": {}}\n', b"{}\n"],
        "alive": [b"{}\n"],
    }
    if attack in begins:
        repeat(*begins[attack])
    elif attack == "stderr":
        while True:
            os.write(2, b"x")
            time.sleep(0.2)
    else:
        repeat(f"{attack}\n".encode(), b"{}\n")


if __name__ == "__main__":
    main(sys.argv[1])

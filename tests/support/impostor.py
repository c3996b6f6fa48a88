"""A program in the place of the agent's `receive` on a node: `impostor.py ATTACK`, run as the login user
could."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import threading
import time


def in_place_of_receive(attack: str) -> str:
    """Return the program that runs a node's commands, for LocalRunner.wrap: all but `receive` are the
    agent's."""
    impostor = shlex.join([sys.executable, "-I", __file__, attack])
    script = f'case "$3" in *" receive") exec {impostor};; *) exec "$@";; esac'
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


def main(attack: str) -> None:
    sys.stdin.buffer.raw.readline()
    if attack != "never reads":
        threading.Thread(target=drain, daemon=True).start()
    begins = {
        "alive": [b"{}\n"],
        "never reads": [b'{"wants": {"files": [0, 1]}}\n', b"{}\n"],
        "done, and goes on": [b'{"wants": {}}\n', b'{"complete": true}\n', b'{"done": {}}\n', b"{}\n"],
    }
    if attack == "stderr":
        while True:
            os.write(2, b"x")
            time.sleep(0.2)
    repeat(*begins.get(attack, [f"{attack}\n".encode(), b"{}\n"]))


if __name__ == "__main__":
    main(sys.argv[1])

"""TensorBoard on a node: what it can show, and running it for as long as this process is connected."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Sequence

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.ssh.running import CommandSpec

_MAX_LISTING = 1 << 20  # bytes
_START_SECONDS = 300.0  # pip may have to install it; then it writes a line each second
_PORT = re.compile(rb"^([1-9]\d{3,4})\n", re.MULTILINE)


def find_logs(runner: Runner, node: int, project: str, folders: Sequence[str]) -> str:
    """Return the deepest folder with all event files below `folders`, '' for none. Raises NodeError."""
    command = (
        f'cd "$HOME"/{project} && find -H {shlex.join(f"./{folder}" for folder in folders)} -mindepth 1 '
        f"-name '.*' -prune -o -type f -name 'events.out.tfevents.*' -print0 2> /dev/null "
        f"| head -c {_MAX_LISTING}"
    )
    found = runner.run(node, CommandSpec(command, until_exit=True)).stdout.decode(errors="surrogateescape")
    folders = [posixpath.dirname(file) for file in found.split("\0")[:-1]]
    return posixpath.normpath(posixpath.commonpath(folders)) if folders else ""


def run(runner: Runner, node: int, python: str, logdir: str, on_port: Callable[[int], None]) -> None:
    """Run TensorBoard with a Python of the node, for a folder below the home folder, until this function is
    interrupted. `on_port` gets its port on the node's loopback once it listens. Raises NodeError."""
    out = bytearray()

    def receive(data: bytes) -> None:
        if _PORT.search(out):
            return
        out.extend(data)
        if port := _PORT.search(out):
            on_port(int(port[1]))

    words, problem = ("tensorboard.sh", python, logdir), "TensorBoard does not run"
    hint = "[setup] environment can install tensorboard with the packages of the project"
    client.run_script(
        runner, node, *words, problem=problem, hint=hint, seconds=_START_SECONDS, on_stdout=receive
    )

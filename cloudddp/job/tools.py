"""py-spy for the nodes: the agents read the stacks of a stalled job with it, also when nobody is connected.

It is one static program in the wheel of py-spy. `launch` sends this computer's to each node that lacks it, after the ranks have
been started. Where this computer has none, or is of another kind than the nodes, an agent that needs it takes that of the ranks'
Python, or installs it with pip into a folder of its own; without it, stacks are less exact.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
import sysconfig
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.stacks import ToolRequest
from cloudddp.agent.protocol.start import StartReply
from cloudddp.errors import CloudDDPError

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}  # other names of the same
LEVEL = 1  # of compression: 8 MB become 3.2 in 0.1 s, and 2.8 in 0.4 s


@dataclass(frozen=True, slots=True)
class Tool:
    """py-spy of this computer. `platform` is of the nodes that it runs on, such as linux-x86_64; `digest` its SHA-256."""

    program: bytes
    digest: str
    platform: str

    def send(self, runner: Runner, node: int) -> None:
        """Put it on a node. Raises NodeError."""
        packed = _packed(self.program)
        request = ToolRequest(len(packed), self.digest)
        client.call(runner, node, request, body=[packed])


@functools.lru_cache(maxsize=1)
def _packed(program: bytes) -> bytes:
    return zlib.compress(program, LEVEL)


def local() -> Tool | None:
    """Return py-spy of this Python's environment, None where it is missing or cannot be read."""
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        path = folder / "py-spy"
        if path.is_file() and os.access(path, os.R_OK | os.X_OK):
            try:
                program = path.read_bytes()
            except OSError:
                continue
            return Tool(program, hashlib.sha256(program).hexdigest(), _platform())
    return None


def send_where_missing(
    runner: Runner, started: Mapping[int, StartReply], progress: Callable[[str], None]
) -> None:
    """Send py-spy to the nodes on which a job was `started` and that lack it. A failure is a warning: the job runs."""
    tool = local()
    if tool is None:
        return
    missing = [
        node
        for node, reply in started.items()
        if reply.platform == tool.platform and reply.tool != tool.digest
    ]
    if not missing:
        return
    progress(
        f"sending py-spy to {len(missing)} node{'s' * (len(missing) != 1)}, for the stacks of a job that stalls"
    )

    def send(node: int) -> None:
        if node in missing:
            tool.send(runner, node)

    for error in runner.each(send, fatal=lambda _: False).errors.values():
        if not isinstance(error, CloudDDPError):
            raise error
        progress(f"warning: py-spy was not sent, so that stacks may be less exact: {error}")


def _platform() -> str:
    machine = platform.machine().lower()
    return f"{platform.system().lower()}-{MACHINES.get(machine, machine)}"

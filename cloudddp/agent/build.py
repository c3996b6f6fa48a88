"""Builds the agent: the modules of infra/node/agent/ and the protocol, reproducibly.

The same sources give the same bytes on every computer: sorted names, fixed times and modes, and no
compression, because the output of zlib differs between versions.
"""

from __future__ import annotations

import functools
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from cloudddp import payload

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip file can hold
_MAIN = b"from agent.__main__ import run\n\nrun()\n"  # what Python runs first


@functools.cache
def sources() -> dict[str, bytes]:
    """Return the agent's modules: path -> text. They are read once, so that a command uses the same agent
    from start to end."""
    return read(payload.root() / "infra" / "node" / "agent", Path(__file__).parent / "protocol")


def read(program: Path, protocol: Path) -> dict[str, bytes]:
    """Return the modules of the folders `program` (as `agent`) and `protocol`."""
    return {
        "__main__.py": _MAIN,
        "cloudddp/__init__.py": b"",
        "cloudddp/agent/__init__.py": b"",
        **dict(_modules(program, "agent")),
        **dict(_modules(protocol, "cloudddp/agent/protocol")),
    }


def archive() -> bytes:
    """Return a zip archive of the agent."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for name, text in sorted(sources().items()):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.create_system = 3  # Unix, also where it is built on another system
            info.external_attr = 0o100644 << 16
            file.writestr(info, text)
    return buffer.getvalue()


def _modules(folder: Path, package: str) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*.py"):
        yield f"{package}/{path.relative_to(folder).as_posix()}", path.read_bytes()

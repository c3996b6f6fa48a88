"""The agent as a program: its archive, and the shell commands that put it on a node and run a step there.

The agent is the modules of infra/node/agent/ and the protocol, known by the hash of their sources. Nothing
depends on the bytes of the archive.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from cloudddp.agent.protocol import ExitCode
from cloudddp.files import payload_root

_MAIN = b"from agent.__main__ import run\n\nrun()\n"  # what Python runs first


@functools.cache
def sources() -> dict[str, bytes]:
    """Return the agent's modules: path -> text. They are read once, so that a command uses the same agent
    from start to end."""
    return read_sources(payload_root() / "infra" / "node" / "agent", Path(__file__).parent / "protocol")


def read_sources(program: Path, protocol: Path) -> dict[str, bytes]:
    """Return the modules of the folders `program` (as `agent`) and `protocol`."""
    return {
        "__main__.py": _MAIN,
        "cloudddp/__init__.py": b"",
        "cloudddp/agent/__init__.py": b"",
        **dict(_modules(program, "agent")),
        **dict(_modules(protocol, "cloudddp/agent/protocol")),
    }


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, text in sorted(sources().items()):
            file.writestr(name, text)
    return buffer.getvalue()


def _modules(folder: Path, package: str) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*.py"):
        yield f"{package}/{path.relative_to(folder).as_posix()}", path.read_bytes()


# Isolated from the user's variables and folders, and without site-packages, whose .pth files may take long.
_PYTHON = "python3 -IS -X utf8"


@functools.cache
def _agent_hash() -> str:
    return hashlib.sha256(b"".join(text for _, text in sorted(sources().items()))).hexdigest()


def agent_id() -> str:
    """Return what identifies the agent of this cloudddp: the beginning of its hash."""
    return _agent_hash()[:12]


def agent_path() -> str:
    """Return the path of the agent's folder on a node, below the home folder. It is unpacked, so that Python
    keeps the byte code: `start` takes half the time of one that runs from an archive."""
    return f".cloudddp/agent-{agent_id()}"


def step_of(command: str) -> str:
    """Return the step that a command runs, or '' for a command that does not call the agent."""
    found = re.search(rf"{_PYTHON} \S+/agent-[0-9a-f]+ (\w+)", command)
    return found.group(1) if found else ""


def _is_intact() -> str:
    """Return the shell test that the agent's sources are there and whole."""
    hashed = "find . -name '*.py' | LC_ALL=C sort | xargs cat | sha256sum"
    folder = f'cd "$HOME"/{agent_path()} 2>/dev/null'
    return f'[ "$({folder} && {hashed} 2>/dev/null)" = "{_agent_hash()}  -" ]'


@functools.cache
def compressed_agent() -> bytes:
    """Return the agent's archive, gzipped as a whole."""
    return gzip.compress(archive(), 6, mtime=0)


def ship() -> str:
    """Return the command that takes the agent, compressed, from stdin and puts it in place whole.

    An intact agent is kept: a node whose disk is full can still be queried, and a process that runs from it
    imports the rest from it. So of two laptops that ship at once, one puts its folder there.
    """
    path = f'"$HOME"/{agent_path()}'
    new, old = f"{path}.$$", f"{path}.$$.old"
    install = (
        f"gzip -dc > {new}.zip && {_PYTHON} -m zipfile -e {new}.zip {new} && "
        f"{{ mv -T {new} {path} 2>/dev/null || {_is_intact()} || "
        f"{{ mv -T {path} {old} && mv -T {new} {path}; }}; }}; code=$?; "
        f"rm -rf {new} {new}.zip {old}; (exit $code)"
    )
    return (
        'umask 077; mkdir -p "$HOME"/.cloudddp && '
        f"if {_is_intact()}; then cat > /dev/null; else {install}; fi"
    )


def step_command(step: str) -> str:
    """Return the command that does a step if the agent is there and whole, and exits with NO_AGENT
    otherwise."""
    agent = f'exec {_PYTHON} "$HOME"/{agent_path()} {step}'
    return f"{{ {_is_intact()}; }} || exit {ExitCode.NO_AGENT.value}; {agent}"

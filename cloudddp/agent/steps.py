"""A step of the agent: the shell commands that put the agent on a node and run a step there, and what the
node answers: a message of the protocol, the frames of `follow`, or an error for the user.

The agent is the modules of infra/node/agent/ and the protocol. The same sources give the same bytes on every
computer: sorted names, fixed times and modes, and no compression, because the output of zlib differs between
versions.

Any rank runs as the login user and can replace the agent, so a reply may contain anything. msgspec
builds no objects for unknown fields, so unexpected data takes no memory beyond its own size: `json.loads`
would take 25 times that. Expected data takes up to 20 times its size, so its lists and objects are counted
before. msgspec reads the type hints and runs the checks of the same dataclasses as protocol/codec.py.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import re
import shlex
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from cloudddp.agent.protocol import ExitCode
from cloudddp.agent.protocol.codec import MAX_REPLY, ProtocolError
from cloudddp.agent.protocol.frames import (
    DROPPED,
    END,
    HEARTBEAT,
    LOG,
    MAX_STATE,
    STATE,
    End,
    Frame,
    Heartbeat,
    Log,
    parse_dropped,
    parse_log_header,
)
from cloudddp.agent.protocol.jobs import MAX_RANKS, JobState
from cloudddp.agent.protocol.manifest import MAX_FILES
from cloudddp.agent.protocol.phases import VersionConflict
from cloudddp.errors import Command, NodeError
from cloudddp.files import payload_root
from cloudddp.ssh.running import Result
from cloudddp.text import one_line

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip file can hold
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


def agent_command(*words: str) -> str:
    """Return the command that runs the agent with these arguments."""
    return f'exec {_PYTHON} "$HOME"/{agent_path()} {shlex.join(words)}'


@functools.cache
def compressed_agent() -> bytes:
    """Return the agent's archive, gzipped. Nothing depends on the bytes, so the version of zlib does not
    matter."""
    return gzip.compress(archive(), 6, mtime=0)


def ship(then: str) -> str:
    """Return the command that takes the agent, compressed, from stdin and puts it in place whole, then runs
    `then`.

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
        f"if {_is_intact()}; then cat > /dev/null; else {install}; fi && {then}"
    )


def step_command(step: str) -> str:
    """Return the command that does a step if the agent is there and whole, and exits with NO_AGENT
    otherwise."""
    return f"{{ {_is_intact()}; }} || exit {ExitCode.NO_AGENT.value}; {agent_command(step)}"


T = TypeVar("T")

MAX_CONTAINERS = MAX_FILES + 10_000  # lists and objects in one reply; the longest list of jobs has 100,000
# A text, also one without an end, or the beginning of a list or an object. Possessive: without backtracking.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|([\[{])', re.DOTALL)

_decoders: dict[type[Any], Any] = {}  # msgspec's decoder of each type of message
_lock = threading.Lock()


def decode(data: bytes, kind: type[T], *, limit: int = MAX_REPLY) -> T:
    """Return the message that `data`, JSON in UTF-8, describes. Raises ProtocolError for anything else."""
    if len(data) > limit:
        raise ProtocolError(f"it is {len(data)} bytes long, more than {limit}")
    if _has_more_containers(data, MAX_CONTAINERS):
        raise ProtocolError(f"it has more than {MAX_CONTAINERS} lists and objects")
    try:
        found: T = _decoder(kind).decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise ProtocolError(one_line(str(error), 200)) from None
    return found


def _decoder(kind: type[Any]) -> Any:
    """Return the decoder of a type. One thread at a time makes a new one.

    msgspec 0.22 stores its description of a dataclass on the class before the fields are filled in. A second
    thread that needs the same class meanwhile reads null pointers, and the process ends with SIGSEGV.
    """
    import msgspec  # 10 ms, which `--help` need not take

    with _lock:
        if kind not in _decoders:
            _decoders[kind] = msgspec.json.Decoder(kind)
        return _decoders[kind]


def _has_more_containers(data: bytes, limit: int) -> bool:
    if data.count(b"[") + data.count(b"{") <= limit:
        return False
    return sum(token.lastindex == 1 for token in _TOKEN.finditer(data)) > limit  # not those in texts


LONGEST_REASON = 500  # characters of a node's error text in a message


class RefusedByAgent(NodeError):
    """The agent refuses this step; a retry does not help."""


class NoSuchJob(RefusedByAgent):
    """The node does not know the job."""


class OtherAgentVersion(RefusedByAgent):
    """Jobs run on the node under an agent of another version, so this one must not touch them."""

    def __init__(self, node: int, conflict: VersionConflict) -> None:
        jobs = ", ".join(conflict.jobs)
        super().__init__(
            f"node {node}: job {jobs} runs under agent version {conflict.store}, this cloudddp has version "
            f"{conflict.agent}",
            hint=(
                "wait until it has ended, or cancel it with the cloudddp that started it; ",
                Command("down"),
                " ends the nodes and the job",
            ),
        )
        self.jobs = conflict.jobs


def named_step(step: str, error: NodeError) -> NodeError:
    """Return an error of the connection for the user, who does not know the command."""
    if not error.reason:
        return error
    return NodeError(f"{error.reason}, in step {step!r} of the agent", hint=error.hint, reason=error.reason)


def raise_refusal(node: int, result: Result) -> None:
    if result.exit_code == ExitCode.NO_JOB:
        raise NoSuchJob(f"node {node}: {failure_text(result)}")
    if result.exit_code == ExitCode.OTHER_VERSION:
        try:
            conflict = decode(result.stderr.rstrip().rpartition(b"\n")[2], VersionConflict)
        except ProtocolError:
            return  # an ordinary failure
        raise OtherAgentVersion(node, conflict)


def unreadable(node: int, step: str, error: ProtocolError) -> NodeError:
    """Return the error for a reply that no agent sends: the node runs another program in place of the
    agent."""
    return NodeError(
        f"node {node} sent an answer that cloudddp cannot read (step {step!r} of agent "
        f"{agent_id()}): {error}",
        hint=(
            "a program on that node has replaced the agent or writes into its output; ",
            "look with ",
            Command("ssh", str(node)),
            ", or end the cluster with ",
            Command("down"),
        ),
    )


def failure_text(result: Result) -> str:
    """Return the last line that a command wrote, safe to show, or its exit code where it wrote nothing."""
    if result.exit_code == ExitCode.NO_AGENT and not result.stderr:
        return "the agent's file there is missing or was changed; repeat the command"
    text = (result.stderr or result.stdout)[-(4 * LONGEST_REASON) :].decode(errors="replace")
    lines = text.strip().splitlines()
    return one_line(lines[-1], LONGEST_REASON) if lines else f"exit code {result.exit_code}"


def is_silence(error: Exception) -> bool:
    """Whether a node's connection broke, or it did not answer."""
    return isinstance(error, NodeError) and bool(error.reason)


class FrameDecoder:
    """Splits a byte stream into frames. It never holds more than one frame and the bytes just fed."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0  # bytes of the buffer that contain no line break
        self._ranks: set[int] = set()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete. Raises ProtocolError for bytes that no agent sends."""
        self._buffer += data
        while (cut := self._buffer.find(b"\n", self._searched)) >= 0:
            frame, end = self._frame(bytes(self._buffer[:cut]), cut + 1)
            if frame is None:
                self._searched = cut
                return
            del self._buffer[:end]
            self._searched = 0
            yield frame
        self._searched = len(self._buffer)
        if self._searched > MAX_STATE:
            raise ProtocolError(f"a frame is longer than {MAX_STATE} bytes")

    def _frame(self, line: bytes, start: int) -> tuple[Frame | None, int]:
        """Return the frame that begins with `line`, None while it is incomplete, and its end in the
        buffer."""
        if line.startswith(LOG):
            return self._log(line, start)
        if line.startswith(DROPPED):
            dropped = parse_dropped(line)
            self._count(dropped.rank)
            return dropped, start
        if line.startswith(STATE):
            return decode(line[len(STATE) :], JobState, limit=MAX_STATE), start
        if line == HEARTBEAT:
            return Heartbeat(), start
        if line == END:
            return End(), start
        raise ProtocolError(f"it begins a frame with {line[:20]!r}")

    def _log(self, line: bytes, start: int) -> tuple[Frame | None, int]:
        rank, offset, length = parse_log_header(line)
        self._count(rank)
        end = start + length
        if end > len(self._buffer):
            return None, end
        return Log(rank, offset, bytes(self._buffer[start:end])), end

    def _count(self, rank: int) -> None:
        self._ranks.add(rank)
        if len(self._ranks) > MAX_RANKS + 2:  # with the launcher and the setup
            raise ProtocolError(f"it has logs of more than {MAX_RANKS} ranks")

"""What a node answers to a step: a message of the protocol, the frames of `follow`, or an error for the user.

Any rank runs as the login user and can replace the agent, so a reply may contain anything. msgspec builds no
objects for unknown fields, so unexpected data takes no memory beyond its own size: `json.loads` would take 25
times that. Expected data takes up to 20 times its size, so the limits in bytes bound the memory, too. msgspec
reads the type hints and runs the checks of the same dataclasses as protocol/codec.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, TypeVar

from cloudddp.agent.program import agent_id
from cloudddp.agent.protocol import ExitCode, transfer
from cloudddp.agent.protocol.codec import MAX_REPLY, ProtocolError
from cloudddp.agent.protocol.frames import LIMITS, RECORDS, End, Frame, Heartbeat, read_log
from cloudddp.agent.protocol.jobs import MAX_RANKS
from cloudddp.agent.protocol.phases import VersionConflict
from cloudddp.agent.protocol.transfer import UNSEALED
from cloudddp.errors import Message, NodeError, q
from cloudddp.ssh.running import Result
from cloudddp.text import one_line

T = TypeVar("T")

_decoders: dict[type[Any], Any] = {}  # msgspec's decoder of each type of message
_lock = threading.Lock()


def decode(data: bytes, kind: type[T], *, limit: int = MAX_REPLY) -> T:
    """Return the message that `data`, JSON in UTF-8, describes. Raises ProtocolError for anything else."""
    if len(data) > limit:
        raise ProtocolError(f"it is {len(data)} bytes long, more than {limit}")
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


LONGEST_REASON = 500  # characters of a node's error text in a message


class RefusedByAgent(NodeError):
    """The agent refuses this step; a retry does not help."""


def raise_refusal(node: int, result: Result) -> None:
    """Raise RefusedByAgent where the node does not know the job, or where jobs run there under an agent of
    another version, so that this one must not touch them."""
    if result.exit_code == ExitCode.NO_JOB:
        raise RefusedByAgent(f"node {node}: {failure_text(result)}")
    if result.exit_code == ExitCode.OTHER_VERSION:
        try:
            conflict = decode(result.stderr.rstrip().rpartition(b"\n")[2], VersionConflict)
        except ProtocolError:
            return  # an ordinary failure
        jobs = ", ".join(conflict.jobs)
        raise RefusedByAgent(
            f"node {node}: job {jobs} runs under agent version {conflict.store}, this cloudddp has version "
            f"{conflict.agent}",
            hint="wait until it has ended, or cancel it with the cloudddp that started it; `cloudddp down` "
            "ends the nodes and the job",
        )


def unreadable(node: int, step: str, error: ProtocolError) -> NodeError:
    """Return the error for a reply that no agent sends: the node runs another program in place of the
    agent."""
    return NodeError(
        f"node {node} sent an answer that cloudddp cannot read (step {step!r} of agent "
        f"{agent_id()}): {error}",
        hint=replaced_hint(node),
    )


def replaced_hint(node: int) -> str:
    return Message(
        "a program on that node has replaced the agent or writes into its output; look with `cloudddp ssh "
        f"{q(node)}`, or end the cluster with `cloudddp down`"
    )


def failure_text(result: Result) -> str:
    """Return the last line that a command wrote, safe to show, or its exit code where it wrote nothing."""
    if result.exit_code == ExitCode.NO_AGENT and not result.stderr:
        return "the agent's file there is missing or was changed; repeat the command"
    text = (result.stderr or result.stdout)[-(4 * LONGEST_REASON) :].decode(errors="replace")
    lines = text.strip().splitlines()
    return one_line(lines[-1], LONGEST_REASON) if lines else f"exit code {result.exit_code}"


class FrameDecoder:
    """Splits a byte stream into frames. It never holds more than one frame and the bytes just fed."""

    def __init__(self) -> None:
        self._frames = transfer.Frames(UNSEALED, LIMITS)
        self._ranks: set[int] = set()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete. Raises ProtocolError for bytes that no agent sends."""
        return map(self._decoded, self._frames.feed(data))

    def end(self) -> None:
        """Raise ProtocolError if a part of a frame is left: its sender has ended with exit code 0."""
        if self._frames.rest:
            raise ProtocolError("it ends within a frame")

    def _decoded(self, found: transfer.Frame) -> Frame:
        if found.kind == transfer.LOG:
            log = read_log(found)
            self._ranks.add(log.rank)
            if len(self._ranks) > MAX_RANKS + 2:  # with the launcher and the setup
                raise ProtocolError(f"it has logs of more than {MAX_RANKS} ranks")
            return log
        if found.kind in RECORDS:
            return decode(found.body, RECORDS[found.kind])
        if found.kind == transfer.HEARTBEAT:
            return Heartbeat()
        return End()

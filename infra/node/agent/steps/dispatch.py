"""Does a step: reads its request, does what it asks for, writes the reply; or, with `serve`, one step after
another over one SSH channel, which saves the laptop a channel and this node an interpreter for each.

A job is served by one version of the agent: files and processes of another one might be misread, and a rank
left running. So the store of another version is taken over while no job runs, and refused while one does.
`serve` does every step in a fork. What follows a step on stdout and on stderr says that it has ended: the
laptop reads them as they are until then. The last step is done by the process itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Optional

from agent.jobs import phases
from agent.node import store
from cloudddp.agent.protocol import SAFE_STEPS, VERSION, ExitCode
from cloudddp.agent.protocol.codec import (
    MAX_REQUEST,
    STDERR_END,
    STEP_HEAD,
    ProtocolError,
    decode,
    encode,
    encode_utf8,
    stdout_end,
)
from cloudddp.agent.protocol.phases import VersionConflict

STEPS = tuple(
    """
        probe receive setup start follow kill jobs new_files pulled pack stacks readings conclude poweroff
    """.split()
)
# What is likely to follow a step: these modules are imported while it runs.
LIKELY = {"probe": ("receive", "start", "follow")}
VERSION_FILE = "version"
UNRECORDED, UNREADABLE = 1, 0  # before version 2 no version was recorded
MAX_DIGITS = 8


def main(step: str, request: Optional[bytes] = None) -> int:
    """Do a step and return the exit code. Without a `request`, it is on stdin."""
    try:
        return run(step, request)
    except BrokenPipeError:  # the laptop disconnected: the job continues
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = "no space is left on this node's disk: `df -h` and `du -xh` there show what uses it"
            raise SystemExit(text) from None
        if error.filename is None:
            raise
        raise SystemExit(f"{error.filename2 or error.filename}: {error.strerror}") from None


def load(step: str) -> ModuleType:
    if step not in STEPS:
        raise SystemExit(f"not a step: {step!r}")
    return import_module(f"agent.steps.{step}")


def run(step: str, given: Optional[bytes]) -> int:
    """Read a step's request, do it, write its reply; return the exit code."""
    module = load(step)
    if given is None:
        with open(0, "rb", buffering=0, closefd=False) as stdin:  # what follows belongs to the step
            given = stdin.readline(MAX_REQUEST + 1)
    try:
        request = decode(given, module.REQUEST)
    except ProtocolError as error:
        raise SystemExit(f"bad request: {error}") from None
    conflict = _conflict(step)
    if conflict is not None:
        sys.stderr.write(encode(conflict).decode() + "\n")
        return int(ExitCode.OTHER_VERSION)
    reply = module.step(request)
    if isinstance(reply, int):
        return reply
    if reply is not None:
        sys.stdout.buffer.write(encode_utf8(reply) + b"\n")
        sys.stdout.buffer.flush()
    return 0


def serve() -> int:
    """Do what is asked for on stdin until it ends; return the exit code."""
    while True:
        head = _read(STEP_HEAD.size)
        if len(head) < STEP_HEAD.size:
            return 0
        size, name_size, is_last = STEP_HEAD.unpack(head)
        if not 0 < name_size < size <= MAX_REQUEST:
            raise SystemExit("not a step of this agent")
        asked = _read(size)
        if len(asked) < size:
            return 0
        step = asked[:name_size].decode("ascii", "replace")
        if step in STEPS:
            load(step)  # here: the next fork for such a step has it already
        pid = 0 if is_last else os.fork()
        if pid == 0:
            return main(step, asked[name_size:])
        for name in LIKELY.get(step, ()):
            load(name)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        code = code if code >= 0 else 128 - code  # as a shell does
        try:
            os.write(2, STDERR_END)
            os.write(1, stdout_end(code))
        except BrokenPipeError:  # the laptop has disconnected
            return 0
        if code:
            return code  # it may have left a part of its input, which must not be taken for a request


def _read(size: int) -> bytes:
    """Return that many bytes of stdin, fewer only at its end. Never more: they belong to the step."""
    data = bytearray()
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            break
        data += piece
    return bytes(data)


# -- the version of the agent that the store belongs to -----------------------------------------------------


def _stored() -> int:
    try:
        text = store.read_bytes(store.ROOT / VERSION_FILE, MAX_DIGITS + 1).decode("ascii").strip()
    except FileNotFoundError:
        return UNRECORDED
    except (OSError, ValueError):
        return UNREADABLE
    return int(text) if text.isdigit() else UNREADABLE


def _conflict(step: str) -> Optional[VersionConflict]:
    """Return why a step must not run now, or None once the store is of this version."""
    if step in SAFE_STEPS or _stored() == VERSION:
        return None
    with store.locked("jobs"):
        found = _stored()
        if found == VERSION:
            return None
        running = phases.running_jobs()
        if running:
            return VersionConflict(found, VERSION, tuple(running))
        with contextlib.suppress(OSError):  # on a full disk the next step tries again
            store.replace(store.ROOT / VERSION_FILE, f"{VERSION}\n".encode())
    return None

"""The steps of the agent: reads a request, does what it asks for, writes the reply."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from types import ModuleType

from agent import version
from cloudddp.agent.protocol import ExitCode
from cloudddp.agent.protocol.codec import MAX_REQUEST, ProtocolError, decode, encode, encode_utf8

STEPS = (
    "probe", "receive", "setup", "start", "follow", "kill", "jobs", "new_files", "pulled", "pack", "stacks",
    "conclude", "poweroff",
)  # fmt: skip


def main(step: str, *request: bytes) -> int:
    """Do a step and return the exit code. Without a `request`, it is on stdin."""
    try:
        return run(step, *request)
    except BrokenPipeError:  # the laptop disconnected: the job continues
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = "no space is left on this node's disk: `df -h` and `du -xh` there show what uses it"
        raise SystemExit(text) from None


def load(step: str) -> ModuleType:
    """Return the module of a step."""
    if step not in STEPS:
        raise SystemExit(f"not a step: {step!r}")
    return import_module(f"agent.{step}")


def run(step: str, *given: bytes) -> int:
    """Read a step's request, do it, write its reply; return the exit code."""
    module = load(step)
    data = given[0] if given else sys.stdin.buffer.readline(MAX_REQUEST + 1)
    try:
        request = decode(data, module.REQUEST)
    except ProtocolError as error:
        raise SystemExit(f"bad request: {error}") from None
    conflict = version.conflict(step)
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

"""`serve`: does one step after another over one SSH channel, which saves the laptop a channel and this node an interpreter
for each.

Every step is done by a fork. What follows a step on stdout and on stderr says that it has ended: the laptop reads them as
they are until then. The last step is done by this process itself.
"""

from __future__ import annotations

import os

from agent import steps
from cloudddp.agent.protocol.codec import MAX_REQUEST
from cloudddp.agent.protocol.serve import HEAD, STDERR_END, stdout_end


def main() -> int:
    """Do what is asked for on stdin until it ends; return the exit code."""
    while True:
        head = _read(HEAD.size)
        if len(head) < HEAD.size:
            return 0
        size, names_size, is_last = HEAD.unpack(head)
        if not 0 < names_size < size <= MAX_REQUEST:
            raise SystemExit("not a step of this agent")
        asked = _read(size)
        if len(asked) < size:
            return 0
        step, *then = asked[:names_size].decode("ascii", "replace").split(" ")
        if step in steps.STEPS:
            steps.load(step)  # here: the next fork for such a step has it already
        pid = 0 if is_last else os.fork()
        if pid == 0:
            return steps.main(step, asked[names_size:])
        for name in then:
            steps.load(name)
        code = _exit_code(os.waitpid(pid, 0)[1])
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


def _exit_code(status: int) -> int:
    """Return what a shell would return for a process that ended like this."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

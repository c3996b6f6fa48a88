"""The command line of the agent: `STEP [REQUEST]`, `serve`, `rank JOB COMMAND...`, `upload`, `download`,
`notify`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn


def main() -> int:
    """Do what the arguments ask for; return the exit code. Each branch imports what only it needs."""
    command, arguments = sys.argv[1], sys.argv[2:]
    if command == "rank":
        from agent.ranks import rank

        return rank.main(*arguments)
    if command == "upload":
        from agent.s3 import upload

        return upload.main(*arguments)
    if command == "download":
        from agent.s3 import download

        return download.main(*arguments)
    if command == "notify":
        from agent.jobs import notify

        return notify.main()
    if command == "serve":
        from agent.steps import dispatch

        return dispatch.serve()
    from agent.steps import dispatch

    return dispatch.main(command, *(word.encode() for word in arguments))


def run() -> NoReturn:
    """Run `main`, and end this process at once: a thread that still runs may hold the lock of stdout, for
    which the interpreter would wait in vain while it finalizes, and abort."""
    code = main()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed before the start
        with suppress(OSError):  # the laptop has disconnected
            stream.flush()
    os._exit(code)

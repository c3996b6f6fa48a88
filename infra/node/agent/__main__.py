"""The command line of the agent: `STEP`, `serve`, `rank JOB COMMAND...`, `upload`, `download`,
`notify`, `dumps FOLDER`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

_PROGRAMS = {
    "rank": "agent.ranks.rank",
    "upload": "agent.s3.upload",
    "download": "agent.s3.download",
    "notify": "agent.jobs.notify",
    "dumps": "agent.watch.flight_recorder",
}


def main() -> int:
    """Do what the arguments ask for; return the exit code. Only what it needs is imported."""
    command, arguments = sys.argv[1], sys.argv[2:]
    if command in _PROGRAMS:
        return int(import_module(_PROGRAMS[command]).main(*arguments))
    from agent.steps import dispatch

    if command == "serve":
        return dispatch.serve()
    return dispatch.main(command)


def run() -> NoReturn:
    """Run `main`, and end this process at once: a thread that still runs may hold the lock of stdout, for
    which the interpreter would wait in vain while it finalizes, and abort."""
    code = main()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed before the start
        with suppress(OSError):  # the laptop has disconnected
            stream.flush()
    os._exit(code)

"""The command line of the agent: `STEP [REQUEST]`, `serve`, `rank JOB COMMAND...`, `upload`, `compile`."""

from __future__ import annotations

import sys


def main() -> int:
    """Imports are here: each takes milliseconds, and none of these commands needs those of another one."""
    command, arguments = sys.argv[1], sys.argv[2:]
    if command == "rank":
        from agent import garbage, rank

        garbage.collect()
        return rank.main(*arguments)
    if command == "upload":
        from agent import garbage, upload

        garbage.collect()
        return upload.main(*arguments)
    if command == "compile":
        from agent import compiled

        return compiled.main()
    if command == "serve":
        from agent import serve

        return serve.main()
    from agent import steps

    return steps.main(command, *(word.encode() for word in arguments))

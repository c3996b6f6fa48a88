"""In place of the agent's `serve`: for a step with a file of its name in a folder, that shell script answers.

`serving_impostor.py FOLDER ARGUMENT...`, with the arguments of python3. Every other step is the agent's. The
script gets those arguments, the step and the request.
"""

from __future__ import annotations

import os
import sys


def main(folder: str, *arguments: str) -> int:
    agent = arguments[3]  # after -IS -X utf8
    sys.path.insert(0, agent)
    sys.argv = [agent, "serve"]
    from agent.steps import dispatch

    honest = dispatch.main

    def answer(step: str, *request: bytes) -> int:
        script = f"{folder}/{step}"
        if os.path.isfile(script):  # noqa: PTH113  isolated: no more is imported than the agent does
            os.execvp(  # noqa: S606  a program without a shell
                "bash", ["bash", script, *arguments[:4], step, *(one.decode() for one in request)]
            )
        return honest(step, *request)

    dispatch.main = answer
    return dispatch.serve()


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))

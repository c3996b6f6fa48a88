"""For stand-ins of the SSH fleet whose `run` waits: starting a command without waiting."""

from __future__ import annotations

import threading
from typing import Any

from cloudddp.ssh.command_loop import OnEnd
from cloudddp.ssh.running import CommandSpec, Result


def start_in_thread(runner: Any, node: int, spec: CommandSpec, on_end: OnEnd) -> None:
    def run() -> None:
        end: Result | Exception
        try:
            end = runner.run(
                node,
                spec.command,
                stdin=spec.stdin,
                command_timeout=spec.command_timeout,
                on_stdout=spec.on_stdout,
                on_stderr=spec.on_stderr,
            )
        except Exception as error:
            end = error
        on_end(end)

    threading.Thread(target=run, daemon=True).start()

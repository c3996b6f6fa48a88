"""For stand-ins of the SSH fleet whose `run` waits: starting a command without waiting."""

from __future__ import annotations

import threading
from typing import Any

from cloudddp.ssh.pump import OnEnd
from cloudddp.ssh.running import Order, Result


def start_in_thread(runner: Any, node: int, order: Order, on_end: OnEnd) -> None:
    def run() -> None:
        end: Result | Exception
        try:
            end = runner.run(
                node,
                order.command,
                stdin=order.stdin,
                command_timeout=order.command_timeout,
                on_stdout=order.on_stdout,
                on_stderr=order.on_stderr,
            )
        except Exception as error:
            end = error
        on_end(end)

    threading.Thread(target=run, daemon=True).start()

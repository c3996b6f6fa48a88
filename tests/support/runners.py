"""For stand-ins of the SSH fleet whose `run` waits: starting a command without waiting."""

from __future__ import annotations

import threading
from typing import Any

from cloudddp.agent.client import run_at_once
from cloudddp.ssh.command_loop import OnEnd
from cloudddp.ssh.running import CommandSpec


def start_in_thread(runner: Any, node: int, spec: CommandSpec, on_end: OnEnd) -> None:
    threading.Thread(target=run_at_once, args=(runner, node, spec, on_end), daemon=True).start()

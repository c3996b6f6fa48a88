"""Commands that get Ctrl-C at an exact moment."""

from __future__ import annotations

import signal
from typing import Any

from support.faults import FaultyEndpoint
from support.harness import finished
from support.processes import Process, zygote

_PROGRAM = """
import importlib, os, signal, sys
from cloudddp import __main__

module, _, path = {moment!r}.partition(":")
*owners, name = path.split(".")
owner = importlib.import_module("cloudddp." + module)
for one in owners:
    owner = getattr(owner, one)
real = getattr(owner, name)

sent = False

def interrupted(*args, **kwargs):
    global sent
    now = {caller!r} in ("", sys._getframe(1).f_code.co_name)
    if now and {on_call}:
        sent = True
        os.kill(os.getpid(), {number})
    result = real(*args, **kwargs)
    if now and not {on_call}:
        sent = True
        os.kill(os.getpid(), {number})
    return result

setattr(owner, name, interrupted)
try:
    __main__.main()
finally:
    if not sent:
        sys.stderr.write("the function was not called, so no interrupt was sent\\n")
        sys.stderr.flush()
        os._exit(99)
"""


def start_interrupted(
    cli: Any, moment: str, *words: str, caller: str = "", on_call: bool = False, number: int = signal.SIGINT
) -> Process:
    """Start a command that gets Ctrl-C (or the signal `number`) as a function returns, or with `on_call` as
    it is called.

    `moment` is the function, for example `cli.console:Progress.stop`; with `caller` only calls by this
    function count. Every module is imported before: where a module has `from ... import f`, name `f` in that
    module.
    """
    program = _PROGRAM.format(moment=moment, caller=caller, on_call=on_call, number=int(number))
    argv = ("-c", program, *words)
    assert zygote().can_fork(argv, cli.env)
    process = zygote().start(argv, cli.cwd, cli.env)
    cli.started.append(process)
    return process


def interrupted_at(
    cli: Any,
    moment: str,
    *words: str,
    caller: str = "",
    on_call: bool = False,
    number: int = signal.SIGINT,
    code: int = 130,
) -> tuple[str, str]:
    """Run a command as `start_interrupted` does, require this exit code, return (stdout, stderr)."""
    return finished(
        start_interrupted(cli, moment, *words, caller=caller, on_call=on_call, number=number), code
    )


def interrupted_at_call(
    cli: Any, faults: FaultyEndpoint, action: str, *words: str, number: int = signal.SIGINT
) -> str:
    """Run a command that gets Ctrl-C (or the signal `number`) when AWS has carried out this call, before the
    answer. Require the exit code of that, return stderr."""
    came, go = faults.hold(action)
    process = cli.start(*words)
    assert came.wait(60)
    process.send_signal(number)
    go.set()
    return finished(process, -number if number == signal.SIGKILL else 130)[1]

"""When Python collects cyclic garbage: not while a command starts, and not when it ends.

Imports and the models of AWS's services leave many objects that stay, and almost no garbage. Collections that visit them
took 70 ms of the 400 ms of processor time of `cloudddp status`. A command that goes on after its first answer from AWS
collects as usual, without those objects. Standard library only: the edge imports it first.
"""

from __future__ import annotations

import gc


def postpone() -> None:
    """Collect nothing until `resume`."""
    gc.disable()


def resume() -> None:
    """Collect again, but never what exists now. Any thread may call it, more than once."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def abandon() -> None:
    """Leave everything to the end of the process: the interpreter would otherwise visit every object twice as it exits."""
    gc.freeze()

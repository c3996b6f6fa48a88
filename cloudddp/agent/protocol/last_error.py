"""The error in the last lines that a rank or a launcher has written. Pure.

The last line is often not the error: torch, C++ and faulthandler report the end of a process, and other
threads continue to write. Callers limit the number and the length of the lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Optional

from cloudddp.agent.protocol.frozen import frozen

# Exit codes after SIGILL, SIGABRT, SIGBUS, SIGFPE and SIGSEGV, of which faulthandler reports.
CRASHED = (132, 134, 135, 136, 139)
MOST_AFTER = 10  # lines of a message or of notes below an exception; with more, the script continued
# Colours; `[rank3]: ` of torch, `[default0]:` of torchrun; times of loggers; lines of an exception group.
_PREFIX = re.compile(r"(?:\x1b\[[\d;]*m|\[[a-z_]+\d+\]: ?|\[?\d{4}-\d\d-\d\d[T ][\d:.,]+Z?\]?:? )+|  +\| ")
_OF_TORCH = re.compile(r"\[rank\d+\]: ")  # only of an exception that nobody has caught
_HEADER = re.compile(r"Traceback \(most recent call last\)|^ +\+-.*- \d+ -+$")
_FRAME = re.compile(r'\s+File ".+", line \d+(?:, in .+)?$')
_RAISED = re.compile(r"([A-Za-z_][\w.<>]*)(?::| *$)")
_IGNORED = re.compile(r"Exception ignored (?:in|while)\b|Error in atexit\b")
_CHAINED = re.compile(r"During handling of the above|The above exception was the direct")
_THROWN = re.compile(r"terminate called after throwing an instance of '(.+)'")
_UNWOUND = "terminate called without an active exception"  # a thread of gloo at the end of the interpreter
_FATAL = "Fatal Python error: "
_RUNNING = re.compile(r'  File ".+", line \d+ in <module>$|  \.\.\.$|<Cannot show all')  # or it may be
# Code, boxes of rich, C++, glog, faulthandler, bash, multiprocessing, NCCL, wandb, warnings.
_NO_ERROR = re.compile(
    r"\s|$|[│╭╰]|terminate called|frame #\d|Exception raised from|\[?[IWEF]\d{4} |Fatal Python error: "
    r"|(?:Current t|T)hread 0x|Extension modules: |\*\*\* |wandb: |.+:\d+: \w*Warning: "
    r"|.*(?:resource_tracker|\bNCCL (?:INFO|WARN)\b|\bline \d+: +\d+ (?:Aborted|Segmentation fault)\b)"
)


@frozen
class LastError:
    """`text` is the first line of the exception that ended the program; without one, the last line that does
    not only report the end of a process. `kind` is the exception's class, '' for none; `raised`: Python has
    raised it. `lines` are those of the exception and of its causes, without code; all lines where Python has
    raised none. `at` is the index of `text`. `after_end`: the process crashed after the end of the
    script."""

    text: str
    kind: str
    raised: bool
    lines: tuple[str, ...]
    at: int
    after_end: bool


def last_error(lines: Sequence[str], exit_code: Optional[int] = None) -> LastError:
    """Return the error in the last lines of a program. `exit_code`: None if it is not known; a program that
    was killed (SIGKILL, SIGTERM) has raised nothing."""
    clean = [one[match.end() :] if (match := _PREFIX.match(one)) else one for one in lines]
    crashed = exit_code in CRASHED
    dump = max((n for n, one in enumerate(clean) if one.startswith(_FATAL)), default=len(clean))
    running = crashed and any(map(_RUNNING.match, clean[dump:]))
    if ((exit_code or 0) <= 128 or (crashed and not running)) and (found := _exception(lines, clean)):
        begin, at, kind = found
        said = tuple(one for one in clean[begin:] if not _NO_ERROR.match(one))
        return LastError(clean[at], kind, True, said, at, crashed)
    after_end = crashed and not running and (dump < len(clean) or _UNWOUND in clean[-MOST_AFTER:])
    for at, line in enumerate(clean):
        if thrown := _THROWN.match(line):
            what = "".join(clean[at + 1 : at + 2]).partition("what():")[2].strip()
            return LastError(f"{thrown[1]}: {what}", thrown[1], False, tuple(clean), at, after_end)
    at = max((n for n, one in enumerate(clean) if not _NO_ERROR.match(one)), default=len(clean) - 1)
    at = dump if running and dump < len(clean) else at
    return LastError("".join(clean[at : at + 1]), "", False, tuple(clean), at, after_end)


def _exception(lines: Sequence[str], clean: Sequence[str]) -> Optional[tuple[int, int, str]]:
    """Return where the chain of the last exception begins, the line of that exception, and its class; None
    where the script continued after it. The head of a long traceback may be missing."""
    found: Optional[tuple[int, int, str]] = None
    begin, reading, chained, ignored = 0, False, False, False
    for number, line in enumerate(clean):
        if _HEADER.search(line) or (not reading and _FRAME.match(line)):
            begin = begin if chained else number
            reading, chained = True, False
        elif _CHAINED.match(line):
            chained = True
        elif _IGNORED.match(line):
            ignored = True
        elif reading and (raised := _RAISED.match(line)):
            found = found if ignored else (begin, number, raised[1])
            reading = ignored = False
    if found is None or _OF_TORCH.match(lines[found[1]]):
        return found
    after = [one for one in clean[found[1] + 1 :] if not _NO_ERROR.match(one)]
    return found if len(after) <= MOST_AFTER else None

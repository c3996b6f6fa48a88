"""The error in what a rank has written last: a table."""

from __future__ import annotations

import pytest

from cloudddp.agent.protocol.last_error import last_error

HEAD = ["Traceback (most recent call last):", '  File "t.py", line 3, in <module>', "    f()"]
VALUE, NAME = ["step 11", *HEAD, "ValueError: x"], ["step 11", *HEAD, "NameError: x"]
OF_TORCH = [f"[rank3]: {line}" for line in VALUE]
GROUP = ["  + Exception Group " + HEAD[0], "  | " + HEAD[1], "  | ExceptionGroup: x", "  +-+--- 1 ---"]
DUMP = ["Fatal Python error: Aborted", "", "Thread 0x00007f (most recent call first):"]
AT_EXIT = [*DUMP, "  <no Python frame>", "", "Extension modules: numpy (total: 1)"]
RUNNING = [*DUMP, '  File "/x/t.py", line 30 in <module>']
UNWOUND = "terminate called without an active exception"
THROWN = ["terminate called after throwing an instance of 'c10::Error'", "  what():  watchdog of 3"]
THROWN += [f"frame #{number}: c10::f() + 0x51 (0x7f in /x/libc10.so)" for number in range(30)]


@pytest.mark.parametrize(
    ("lines", "code", "expected"),
    [
        (VALUE, 1, "ValueError: x"),
        (["[default0]:" + line for line in NAME], 1, "NameError: x"),
        (["2026-11-29 02:38:34,123 " + line for line in NAME], 1, "NameError: x"),
        (['  File "t.py", line 1', "    x = = 1", "        ^", "SyntaxError: x"], 1, "SyntaxError: x"),
        ([*VALUE, "During handling of the above exception, x", *HEAD, "a.Stop", "note"], 1, "a.Stop"),
        ([*GROUP, "    | ImportError: y"], 1, "ImportError: y"),
        ([*VALUE, "/x/resource_tracker.py:2: UserWarning: x", "  warnings.warn("], 1, "ValueError: x"),
        ([*VALUE, "Exception ignored in: <f>", *HEAD, "NameError: y"], 1, "ValueError: x"),
        ([*OF_TORCH, "[rank3]:[W1129 P.cpp:15] x", *THROWN], 134, "ValueError: x"),
        ([*OF_TORCH, UNWOUND, *AT_EXIT], 134, "ValueError: x"),
        ([*NAME, *[f"step {number}" for number in range(12)]], 1, "step 11"),  # the script continued
        ([*NAME, "step 12"], 137, "step 12"),  # it was killed
        ([*NAME, *THROWN, *RUNNING], 134, "c10::Error: watchdog of 3"),
        ([*NAME, *RUNNING], 139, "Fatal Python error: Aborted"),
        (["step 3", "give --config"], 1, "give --config"),  # sys.exit("give --config")
        ([], 1, ""),
        # Whether it has crashed after the end of its script:
        (["finished", UNWOUND], 134, True),  # faulthandler has ended before
        (["finished", *THROWN, *AT_EXIT], 134, True),
        (["finished", *AT_EXIT], 139, True),
        ([UNWOUND, *RUNNING], 134, False),
        ([*DUMP, "  ..."], 139, False),  # too deep to show where it was
        (THROWN, 134, False),  # faulthandler is off, or has ended: unknown
        (AT_EXIT, 1, False),  # of another process
    ],
)
def test_error(lines: list[str], code: int, expected: str | bool) -> None:
    found = last_error(lines, code)
    assert (found.after_end if isinstance(expected, bool) else found.text) == expected

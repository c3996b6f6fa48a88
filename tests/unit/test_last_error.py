"""The error in what a rank has written last: a table."""

from __future__ import annotations

import pytest

from cloudddp.agent.protocol.last_error import last_error

HEAD = ["Traceback (most recent call last):", '  File "t.py", line 3, in <module>', "    f()"]
VALUE, NAME = ["step 11", *HEAD, "ValueError: x"], ["step 11", *HEAD, "NameError: x"]
DUMP = ["Fatal Python error: Aborted", "", "Thread 0x00007f (most recent call first):"]
AT_EXIT = [*DUMP, "  <no Python frame>", "", "Extension modules: numpy (total: 1)"]
RUNNING = [*DUMP, '  File "/x/t.py", line 30 in <module>']
UNWOUND = "terminate called without an active exception"
THROWN = ["terminate called after throwing an instance of 'c10::Error'", "  what():  watchdog of 3"]
THROWN += [f"frame #{number}: c10::f() + 0x51 (0x7f in /x/libc10.so)" for number in range(30)]
GROUP = """
  + Exception Group Traceback (most recent call last):
  |   File "t.py", line 1, in <module>
  | ExceptionGroup: x (1 sub)
  +-+---------------- 1 ----------------
    | ImportError: y
""".splitlines()


def with_prefix(prefix: str, lines: list[str]) -> list[str]:
    return [prefix + line for line in lines]


@pytest.mark.parametrize(
    ("lines", "code", "expected"),
    [
        (VALUE, 1, "ValueError: x"),
        (with_prefix("[default0]:", NAME), 1, "NameError: x"),
        (with_prefix("2026-11-29 02:38:34,123 ", NAME), 1, "NameError: x"),
        (['  File "t.py", line 1', "    x = = 1", "        ^", "SyntaxError: x"], 1, "SyntaxError: x"),
        ([*VALUE, "During handling of the above exception, x", *HEAD, "a.Stop", "note"], 1, "a.Stop"),
        (GROUP, 1, "ImportError: y"),
        ([*VALUE, "/x/resource_tracker.py:2: UserWarning: x", "  warnings.warn("], 1, VALUE[-1]),
        ([*VALUE, "Exception ignored in: <f>", *HEAD, "NameError: y"], 1, "ValueError: x"),
        ([*with_prefix("[rank3]: ", VALUE), "[rank3]:[W1129 P.cpp:15] x", *THROWN], 134, VALUE[-1]),
        ([*with_prefix("[rank3]: ", VALUE), UNWOUND, *AT_EXIT], 134, VALUE[-1]),
        ([*NAME, *with_prefix("step ", [*"0123456789ab"])], 1, "step b"),  # the script has gone on
        ([*NAME, "step 12"], 137, "step 12"),  # it was killed
        ([*NAME, *THROWN, *RUNNING], 134, "c10::Error: watchdog of 3"),
        ([*NAME, *RUNNING], 139, "Fatal Python error: Aborted"),
        (["step 3", "give --config"], 1, "give --config"),  # sys.exit("give --config")
        (["finished", UNWOUND, *AT_EXIT], 134, "finished"),
        ([], 1, ""),
    ],
)
def test_error(lines: list[str], code: int, expected: str) -> None:
    assert last_error(lines, code).text == expected


@pytest.mark.parametrize(
    ("lines", "code", "expected"),
    [
        ([UNWOUND], 134, True),  # faulthandler has ended before
        ([*THROWN, *AT_EXIT], 134, True),
        (AT_EXIT, 139, True),
        ([UNWOUND, *RUNNING], 134, False),
        ([*DUMP, "  ..."], 139, False),  # too deep to show where it was
        (THROWN, 134, False),  # faulthandler is off, or has ended: unknown
        (AT_EXIT, 1, False),  # of another process
    ],
)
def test_crash_after_the_end_of_the_script(lines: list[str], code: int, expected: bool) -> None:
    assert last_error(["finished", *lines], code).after_end is expected

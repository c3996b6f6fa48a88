"""The error in what a rank has written last: a table."""

from __future__ import annotations

import pytest

from cloudddp.agent.protocol.last_error import last_error

TRACE = ["step 11", "Traceback (most recent call last):", '  File "t.py", line 3, in <module>', "    f()"]
AT_EXIT = ["Fatal Python error: Aborted", "", "Thread 0x00007f (most recent call first):", "  <no Python frame>"]
RUNNING = [*AT_EXIT[:3], '  File "/x/t.py", line 30 in <module>', "", "Extension modules: numpy (total: 1)"]
UNWOUND = "terminate called without an active exception"
THROWN = ["terminate called after throwing an instance of 'c10::DistBackendError'", "  what():  watchdog of 3"]
FRAMES = [f"frame #{number}: c10::f() + 0x51 (0x7f in /x/libc10.so)" for number in range(30)]
STEPS = [f"step {number}" for number in range(12)]


def of_torch(*lines: str) -> list[str]:
    return [f"[rank3]: {line}" for line in lines]


@pytest.mark.parametrize(
    ("lines", "code", "expected"),
    [
        ([*TRACE, "ValueError: x"], 1, "ValueError: x"),
        (of_torch(*TRACE, "SyntaxError: invalid syntax (m.py, line 1)"), 1, "SyntaxError: invalid syntax"),
        (["[default0]:" + line for line in (*TRACE, "NameError: x")], 1, "NameError: x"),
        (["2026-11-29 02:38:34,123 " + line for line in (*TRACE, "NameError: x")], 1, "NameError: x"),
        (['  File "t.py", line 1', "    x = = 1", "        ^", "SyntaxError: invalid syntax"], 1, "SyntaxError"),
        ([*TRACE, "KeyError: 'a'", "", "During handling of the above exception, another exception occurred:", "",
          *TRACE[1:], "my.Stop: x", "a note"], 1, "my.Stop: x"),
        (["  + Exception Group " + TRACE[1], '  |   File "t.py", line 1, in <module>', "  | ExceptionGroup: x (1 sub)",
          "  +-+---------------- 1 ----------------", "    | ImportError: y", "    +------------------------"], 1,
         "ImportError: y"),
        ([*TRACE, "ValueError: x", "/usr/lib/python3/multiprocessing/resource_tracker.py:224: UserWarning: leaked",
          "  warnings.warn(", "wandb: synced"], 1, "ValueError: x"),
        ([*TRACE, "ValueError: x", "Exception ignored in: <f>", *TRACE[1:], "NameError: y"], 1, "ValueError: x"),
        ([*of_torch(*TRACE, "ValueError: x"), "[rank3]:[W1129 02:38:34.1 P.cpp:15] Warning: x", *THROWN, *FRAMES],
         134, "ValueError: x"),
        ([*of_torch(*TRACE, "ValueError: x"), UNWOUND, *AT_EXIT], 134, "ValueError: x"),
        ([*TRACE, "ImportError: optional", *STEPS], 1, "step 11"),  # the script has gone on
        ([*TRACE, "ImportError: optional", "step 12"], 137, "step 12"),  # it was killed
        ([*TRACE, "ImportError: optional", *THROWN, *FRAMES, *RUNNING], 134, "c10::DistBackendError: watchdog of 3"),
        ([*TRACE, "ImportError: x", RUNNING[0].replace("Aborted", "Segmentation fault"), *RUNNING[1:]], 139,
         "Fatal Python error: Segmentation fault"),
        (["step 3", "no config: give --config"], 1, "no config: give --config"),  # sys.exit("no config ...")
        (["finished", UNWOUND, *AT_EXIT], 134, "finished"),
        ([], 1, ""),
    ],
)  # fmt: skip
def test_error(lines: list[str], code: int, expected: str) -> None:
    assert last_error(lines, code).text.startswith(expected)
    assert bool(expected) == bool(last_error(lines, code).text)


@pytest.mark.parametrize(
    ("lines", "code", "expected"),
    [
        (["finished", UNWOUND], 134, True),  # faulthandler was disabled before
        (["finished", *THROWN, *AT_EXIT], 134, True),
        (["finished", AT_EXIT[0].replace("Aborted", "Segmentation fault"), *AT_EXIT[1:]], 139, True),
        ([UNWOUND, *RUNNING], 134, False),
        ([*THROWN, *FRAMES], 134, False),  # no report: unknown
        (["finished", *AT_EXIT], 1, False),  # of another process
    ],
)
def test_crash_after_the_end_of_the_script(lines: list[str], code: int, expected: bool) -> None:
    assert last_error(lines, code).after_end is expected

"""What the tests themselves rely on: a forked process is told of like one of subprocess.Popen's."""

from __future__ import annotations

import os

import pytest
from processes import Process


@pytest.mark.parametrize("code", [0, 2, -9])
def test_a_process_that_ended_before_its_pid_was_read_has_its_exit_code(code: int) -> None:
    (out, out_end), (err, err_end), (answer, answer_end) = (os.pipe() for _ in range(3))
    os.write(out_end, b"written\n")
    os.write(answer_end, b"123\n%d\n" % code)
    for end in (out_end, err_end, answer_end):
        os.close(end)
    process = Process(["python"], out, err, answer)
    assert process.pid == 123
    assert process.communicate(timeout=10) == ("written\n", "")
    assert (process.returncode, process.poll()) == (code, code)

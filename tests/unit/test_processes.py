"""The forked processes of the tests behave like those of subprocess.Popen."""

from __future__ import annotations

import os

import pytest
from support.processes import Process


@pytest.mark.parametrize("code", [0, 2, -9])
def test_exit_code_of_a_process_that_ended_before_its_pid_was_read(code: int) -> None:
    (out, out_end), (err, err_end), (answer, answer_end) = (os.pipe() for _ in range(3))
    os.write(out_end, b"written\n")
    os.write(answer_end, b"123\n%d 2048\n" % code)
    for end in (out_end, err_end, answer_end):
        os.close(end)
    process = Process(["python"], out, err, answer)
    assert process.pid == 123
    assert process.communicate(timeout=10) == ("written\n", "")
    assert (process.returncode, process.poll()) == (code, code)
    assert process.peak_memory == 2 << 20
